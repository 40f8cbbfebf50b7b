"""Processes that a run starts and that never outlive it. Linux, standard library only.

handle.py        the owner's side: `with Supervisor.start(...) as s: s.spawn(spec)`
supervisor.py    the supervisor process: watches the owner, answers requests, ends everything
children.py      the processes it started: start, signal, reap
teardown.py      the one ending of a run, and the ending of a run whose supervisor died
sweep.py         find and kill whatever is left of a run, and nothing else
ledger.py        `ledger.jsonl`: what was started, written before it starts; one writer at a time
records.py       `ChildSpec` and `Receipt`
conversation.py  the owner's half of the control line: requests, answers, news
channel.py       JSON lines over the socket pair between owner and supervisor
launch.py        start the supervisor process
signals.py       signals as bytes in a pipe
process.py       facts from Linux: start ticks, boot id, /proc, prctl, pidfd
ports.py         reserve free loopback ports, check that a port is free
logs.py          the last lines of a log, for error messages
errors.py        what can go wrong, each with what to do

Nothing here imports the rest of the package: the supervisor starts in isolated mode (no site
packages), so that it is up within a tenth of a second and cannot be broken by what a run installs.
"""
