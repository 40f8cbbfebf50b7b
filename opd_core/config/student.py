"""The student side: its model, data, task, sampling, training and evaluation."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from opd_core.config.values import Beta, Devices, Frozen, ImportPath, ModelOrPath

TruncatedPolicy = Literal["train", "mask", "drop"]


class LoRAConfig(Frozen):
    """Low-rank adapters (the ``peft`` library) that train in place of the weights."""

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0, description="The adapters' product is scaled by alpha / rank")
    target_modules: str | tuple[str, ...] = Field(
        "all-linear", description="Names of the layers that get one; all-linear is all but the head"
    )


class StudentConfig(Frozen):
    """The model being trained."""

    model: ModelOrPath
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Of sampling and of the training's forward pass; the weights that the "
        "optimizer holds and those that are saved are float32",
    )
    devices: Devices = ("cpu",)
    cpu_threads: int = Field(1, ge=1, description="Compute threads of each actor on a CPU")
    lora: LoRAConfig | None = Field(None, description="null trains all weights")

    @field_validator("dtype", mode="before")
    @classmethod
    def _trainable(cls, value: object) -> object:
        if value == "float16":
            raise ValueError("float16 gradients underflow without a loss scaler: write bfloat16")
        return value

    @property
    def gpus(self) -> int:
        """How many of the devices are GPUs."""
        return sum(not device.startswith("cpu") for device in self.devices)


def gpu_shares(gpus: int, training: int, sampling: int) -> tuple[float, float]:
    """GPUs of each training actor and of each sampling actor, as Ray counts them.

    One each where there are enough. Else a sampling actor may share with one training actor, but
    two training actors never share (NCCL refuses it): hence more than half. Raises ValueError if
    that does not fit either.
    """
    if gpus == 0:
        return 0.0, 0.0
    if gpus >= training + sampling:
        return 1.0, 1.0
    if gpus >= max(training, sampling):
        return 0.6, 0.4
    if sampling == 0:
        raise ValueError(
            f"student.devices: {gpus} GPUs beside sampling.devices are too few for {training} "
            f"training actors, of which no two may share one: name {training} or more besides "
            "those, or lower training.actors"
        )
    raise ValueError(
        f"student.devices: {gpus} GPUs are too few for {training} training actors and {sampling} "
        f"sampling actors, of which no two of a kind may share one: name {max(training, sampling)} "
        "or more, or lower training.actors or sampling.actors"
    )


class DataConfig(Frozen):
    """Rows in the DAPO layout, JSONL or Parquet: ``data_source``, ``prompt`` (messages),
    ``reward_model.ground_truth``."""

    train: ModelOrPath
    evaluation: ModelOrPath | None = Field(
        None, description="Held-out rows; null runs without evaluation"
    )
    max_prompt_tokens: int = Field(2048, ge=1, description="Longer prompts are left out, counted")
    evaluation_rows: int | None = Field(None, ge=1, description="First rows only; null is all")


class TaskSpecConfig(Frozen):
    """What is asked, how it is judged, and what becomes of a group."""

    group_size: int = Field(1, ge=1, description="Rollouts per prompt")
    judge: ImportPath | None = Field(None, description="module:function(text, prompt) -> reward")
    batch_judge: ImportPath | None = Field(None, description="module:function(rollouts) -> rewards")
    judge_timeout_s: float = Field(
        60.0, gt=0, description="A judge or tool that ends no call for so long is taken to hang"
    )
    filter_func: ImportPath | None = Field(None, description="module:function(group) -> keep?")
    tool: ImportPath | None = Field(
        None,
        description="module:function(text, prompt) -> what is appended to the student's turn, or "
        "null to end the answer; its tokens are no part of the loss",
    )
    tool_stop: tuple[str, ...] = Field(
        (), description="Single tokens that end a turn so that the tool is called"
    )
    max_turns: int = Field(8, ge=2, description="Turns of the student in one answer with a tool")
    max_requeue: int = Field(2, ge=0, description="Times that a lost prompt is tried again")
    max_groups_per_step: int | None = Field(
        None, ge=1, description="Groups started for one train step; null is 4 x prompts_per_step"
    )

    @model_validator(mode="after")
    def _one_judge(self) -> Self:
        if self.judge and self.batch_judge:
            raise ValueError("name either 'judge' (per sample) or 'batch_judge', not both")
        return self

    @model_validator(mode="after")
    def _stops_for_a_tool(self) -> Self:
        if bool(self.tool_stop) != (self.tool is not None):
            raise ValueError(
                "tool and tool_stop: a tool is called at the tokens of tool_stop, and at no other: "
                "name both, or neither"
            )
        return self

    @property
    def judged(self) -> bool:
        """Whether rollouts get a reward at all."""
        return bool(self.judge or self.batch_judge)


class StopConfig(Frozen):
    """A target that ends training early."""

    metric: str = Field("eval/accuracy", min_length=1, description="Any metric of the journal")
    at_least: float | None = None
    at_most: float | None = None

    @model_validator(mode="after")
    def _one_bound(self) -> Self:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("name either 'at_least' or 'at_most'")
        return self


class TrainingConfig(Frozen):
    """The optimizer's side of a train step."""

    steps: int = Field(ge=1, description="Train steps, one batch each")
    prompts_per_step: int = Field(ge=1, description="Groups in one batch")
    learning_rate: float = Field(gt=0)
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    weight_decay: float = Field(0.1, ge=0)
    warmup_steps: int = Field(0, ge=0, description="Linear warm-up, in optimizer steps")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Of the learning rate after the warm-up, over all optimizer steps"
    )
    final_learning_rate: float = Field(0.0, ge=0, description="Where linear and cosine end")
    max_grad_norm: float = Field(1.0, gt=0)
    optimizer_steps_per_batch: int = Field(1, ge=1)
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.28, gt=0)
    dual_clip: float = Field(10.0, gt=1)
    importance_cap: float | None = Field(
        2.0,
        gt=0,
        description="Bound of exp(old_logprobs - rollout_logprobs), by which a token's loss is "
        "weighed where other weights (sampling.max_staleness) or a server sampled it; null is off",
    )
    truncated: TruncatedPolicy = Field(
        "train",
        description="Answers cut at max_new_tokens: train them; or train and score none of their "
        "tokens (mask: the reward counts in its group; drop: nobody judges it either)",
    )
    reference_kl_weight: float = Field(
        0.0, ge=0, description="Of the reverse KL to the student as it was at the start; 0 is off"
    )
    packing: bool = Field(
        True, description="Sequences of a forward lie end to end; false pads them to the longest"
    )
    micro_batch_tokens: int = Field(
        8192, ge=1, description="Tokens of one forward on a rank, padding included"
    )
    logprob_chunk_tokens: int = Field(512, ge=1, description="Positions whose logits live at once")
    gradient_checkpointing: bool = False
    teacher_gradient_every: int = Field(
        10,
        ge=0,
        description="Train steps between measurements of the teacher's own gradient norm, a "
        "further forward and backward pass where the task reward trains too; 0 is never",
    )
    actors: int = Field(1, ge=1, description="Data-parallel training actors (ranks)")
    shard_ranks: int | None = Field(
        None,
        ge=1,
        description="Ranks that share one copy of weights and optimizer (FSDP2); null is all of "
        "them, a divisor of training.actors keeps several copies (HSDP)",
    )
    backend: Literal["auto", "gloo", "nccl"] = Field(
        "auto", description="Between ranks; auto is NCCL on GPUs and gloo on CPUs"
    )
    checkpoint_every: int = Field(
        20, ge=0, description="Train steps; 0 keeps none: a resume trains the recorded batches anew"
    )
    keep_checkpoints: int = Field(2, ge=1, description="The newest so many")
    keep_every: int = Field(
        0, ge=0, description="Checkpoints of train steps that this divides stay for good; 0 is none"
    )
    export_checkpoints: bool = Field(
        True, description="Each checkpoint also holds the student in Hugging Face format"
    )
    max_restarts: int = Field(
        2,
        ge=0,
        description="Times that the job is started again after a dead driver, actor or Ray head",
    )
    stop_when: StopConfig | None = Field(None, description="null trains all steps")

    @model_validator(mode="after")
    def _shards_fit(self) -> Self:
        if self.shard_ranks is not None and self.actors % self.shard_ranks:
            raise ValueError(
                f"shard_ranks: {self.shard_ranks} does not divide the {self.actors} training "
                "actors: name a divisor, or null"
            )
        return self

    @model_validator(mode="after")
    def _learning_rate_falls(self) -> Self:
        if self.final_learning_rate > self.learning_rate:
            raise ValueError(
                f"final_learning_rate: {self.final_learning_rate} is above learning_rate "
                f"({self.learning_rate}); the schedules only fall: lower it"
            )
        return self


class EvaluationConfig(Frozen):
    """Held-out evaluation. It never asks a teacher."""

    every: int = Field(0, ge=0, description="Train steps between evaluations; 0 is ends only")
    samples: int = Field(1, ge=1, description="Sampled answers a question")
    pass_at: tuple[int, ...] = Field(
        (), description="For each k: the chance that k of the answers hold a right one (pass@k)"
    )
    temperature: float = Field(1.0, gt=0)

    @field_validator("pass_at")
    @classmethod
    def _distinct(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(k < 1 for k in value) or len(set(value)) != len(value):
            raise ValueError(f"expected distinct numbers from 1, got {list(value)}")
        return value

    @model_validator(mode="after")
    def _enough_samples(self) -> Self:
        if self.pass_at and max(self.pass_at) > self.samples:
            raise ValueError(
                f"pass_at: pass@{max(self.pass_at)} needs at least so many evaluation.samples, "
                f"which is {self.samples}"
            )
        return self
