"use strict";
(() => {
  const card = document.getElementById("token-card");
  if (!card) return;
  const rollouts = new WeakMap();
  let current = null;

  const facts = (box) => {
    if (!rollouts.has(box)) {
      const data = JSON.parse(box.parentElement.querySelector("script").textContent);
      const spans = [...box.querySelectorAll("i")];
      rollouts.set(box, { data, spans, places: new Map(spans.map((span, at) => [span, at])) });
    }
    return rollouts.get(box);
  };
  const add = (parent, name, text) => {
    const child = parent.appendChild(document.createElement(name));
    child.textContent = text;
    return child;
  };
  const rounded = (number) => Number(number.toPrecision(3)).toLocaleString("en", { maximumFractionDigits: 6 });
  const percent = (logprob) => {
    const share = 100 * Math.exp(logprob);
    return (share < 0.0001 ? "below 0.0001" : rounded(share)) + " %";
  };
  const signed = (number) => (number > 0 ? "+" : "") + number.toFixed(3);
  const likes = (k) => {
    if (Math.abs(k) < 0.0005) return "both like it alike";
    return `the ${k > 0 ? "student" : "teacher"} likes it ${rounded(Math.exp(Math.abs(k)))} times as much`;
  };

  const fill = (span, box) => {
    const { data, places } = facts(box);
    const at = places.get(span);
    const student = data.student[at], teacher = data.teacher[at];
    card.replaceChildren();
    add(card, "b", span.textContent);
    card.append(` token ${data.at[at] + 1}`);
    if (student === null || teacher === null) {
      const said = span.className === "m" ? "written by a tool: not sampled, not scored" : "no number";
      add(card, "div", said);
      return;
    }
    const table = add(card, "table", "");
    for (const [name, value] of [["student", student], ["teacher", teacher]]) {
      const row = table.insertRow();
      add(row, "th", name);
      row.insertCell().textContent = value.toFixed(3);
      row.insertCell().textContent = percent(value);
    }
    const k = student - teacher;
    add(card, "div", `k = ${signed(k)}: ${likes(k)}`);
  };

  const place = (span) => {
    const token = span.getClientRects()[0] || span.getBoundingClientRect();
    const { width, height } = card.getBoundingClientRect();
    const room = document.documentElement.clientWidth - width - 8;
    card.style.left = Math.max(8, Math.min(token.left, room)) + "px";
    const below = token.bottom + 8;
    card.style.top = (below + height < window.innerHeight ? below : Math.max(8, token.top - height - 8)) + "px";
  };

  const hide = () => {
    if (current) current.classList.remove("on");
    current = null;
    card.hidden = true;
  };
  const show = (span) => {
    hide();
    current = span;
    fill(span, span.closest(".tokens"));
    span.classList.add("on");
    card.hidden = false;
    place(span);
  };
  const tokenOf = (event) => (event.target instanceof Element ? event.target.closest(".tokens i") : null);

  document.addEventListener("pointerover", (event) => {
    if (event.pointerType !== "mouse") return;
    const span = tokenOf(event);
    if (span) show(span);
    else hide();
  });
  document.addEventListener("click", (event) => {
    const span = tokenOf(event);
    if (span) show(span);
    else hide();
  });
  document.addEventListener("scroll", (event) => {
    if (current && event.target.contains && event.target.contains(current)) hide();
  }, { capture: true, passive: true });
  document.addEventListener("keydown", (event) => {
    const box = document.activeElement;
    if (event.key === "Escape") return hide();
    if (!box || !box.classList.contains("tokens")) return;
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const { spans, places } = facts(box);
    const from = current && box.contains(current) ? places.get(current) : step > 0 ? -1 : spans.length;
    const to = spans[Math.max(0, Math.min(spans.length - 1, from + step))];
    if (!to) return;
    hide();
    to.scrollIntoView({ block: "nearest" });
    requestAnimationFrame(() => show(to));
  });
})();
