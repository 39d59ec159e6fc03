"""A dataflow graph written as the loop that a paper prints: a function over handles, traced once. Torch-free.

A program sees no sample. Its handles know the names of keys, and its calls are recorded, not made
(docs/adr/0022-programs.md). An environment, and samples that are drawn ahead, are added to the recorded calls.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

from prefect_rlhf.rlhf_tasks.algorithms.shared.configs import PolicyConfig
from prefect_rlhf.rlhf_tasks.config.models import JUDGE, JUDGE_REPLIES
from prefect_rlhf.rlhf_tasks.config.training import TrainingConfig
from prefect_rlhf.rlhf_tasks.parallel.layout.transfers import LENGTHS
from prefect_rlhf.rlhf_tasks.protocol.decisions import changing, pure
from prefect_rlhf.rlhf_tasks.spec import WHOLE, CallKind, Decision, ModelFunctionCall, Part
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError

PROMPT_KEYS = ("prompt_ids", "columns")
"""The keys that `fetch` provides to them."""

SEQUENCES = ("input_ids", "response_mask")

KEPT = ("kept_counts", "kept_tokens")
"""The keys under which generation records which tokens could be drawn."""


STAYS = "stays"
"""The key that says of each sample whether it stays in the batch: False where a reward failed on it."""

TOKEN_REWARDS = "token_rewards"
"""The key of the rewards at each token, a whole response's at the last, where some reward judges tokens or steps."""


class GenerateSizes(Protocol):
    """The field of a configuration that generation depends on."""

    @property
    def group_size(self) -> int: ...


class RolloutSizes(GenerateSizes, Protocol):
    """The fields of a configuration that these calls depend on."""

    @property
    def scoring_role(self) -> str: ...
    @property
    def on_reward_error(self) -> str: ...
    @property
    def scores_tokens(self) -> bool: ...


def scored(config: RolloutSizes) -> tuple[str, ...]:
    """The keys that a reward call gives and a train call reads: `scores`, and STAYS where samples may leave."""
    return ("scores", STAYS) if config.on_reward_error == "skip" else ("scores",)


def scored_tokens(config: RolloutSizes) -> tuple[str, ...]:
    """The key that a train call also reads if it learns from the rewards of single tokens."""
    return (TOKEN_REWARDS,) if config.scores_tokens else ()


class PolicySizes(RolloutSizes, Protocol):
    """The fields of a configuration without a critic that its graph depends on."""

    @property
    def records_kept(self) -> bool: ...
    @property
    def beta(self) -> float: ...
    @property
    def mask_truncated_completions(self) -> bool: ...


DATA_SET = "the data set"
GENERATED = (*SEQUENCES, "old_logprobs", "truncated")
"""The keys that generation gives."""


class ProgramError(ConfigError):
    """A program gives no graph that can run. The message names it and says what to change."""


class Handle:
    """The samples of an iteration as a program sees them: which keys they have. They have no values there.

    All handles are of the `batch_size` samples of an iteration, or of a part of them. A call reads the keys of the
    handle that it is given, in their order.
    """

    __slots__ = ("_call", "_group", "_keys", "_part", "_trace")

    def __init__(
        self, trace: "Trace", keys: Iterable[str], group: int, part: Part = WHOLE, call: str = ""
    ) -> None:
        """group: consecutive samples that are of one row of the data. part: of the samples. call: that made them"""
        self._trace, self._keys, self._group, self._part = trace, tuple(dict.fromkeys(keys)), group, part
        self._call = call

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of the keys."""
        return self._keys

    def select(self, *keys: str) -> "Handle":
        """The same samples with these keys alone, in this order: what a call is to read, and so what moves to it."""
        missing = [key for key in keys if key not in self._keys]
        if missing:
            self._trace.refuse(
                f"selects {missing[0]!r}, which nobody has made here; there are {_listed(self._keys)}. Make that key "
                "first, or join the samples that have it (|)"
            )
        return Handle(self._trace, keys, self._group, self._part)

    def union(self, other: "Handle") -> "Handle":
        """The same samples with the keys of both; also written `|`."""
        if self._part != other._part or self._group != other._group:
            self._trace.refuse(
                f"joins {self!r} and {other!r}, which are not the same samples. Repeat both, and take the same part "
                "of both"
            )
        return Handle(self._trace, (*self._keys, *other._keys), self._group, self._part)

    __or__ = union

    def repeat(self, n: int) -> "Handle":
        """Each row of the data set n times, side by side: a group. n is the configuration's `group_size`."""
        size = self._trace.config.group_size
        made = [key for key in self._keys if self._trace.makers[key] != DATA_SET]
        if made or self._group != 1:
            self._trace.refuse(
                f"repeats {self!r}: only rows of the data set are repeated, and once. Do it before the first "
                "call"
            )
        if n != size:
            self._trace.refuse(
                f"repeats rows {n} times, but the configuration's group_size is {size}. Repeat them {size} times"
            )
        return Handle(self._trace, self._keys, n, self._part)

    def chunk(self, n: int) -> list["Handle"]:
        """n equal parts of the samples, consecutive whole groups each. A call on each of them is one call in n parts,
        which run one after the other, and a part may be scored while the next is generated."""
        whole = [key for key in self._keys if self._trace.cut(key) not in (None, n)]
        if n < 1 or whole or self._part != WHOLE:
            self._trace.refuse(
                f"cuts {self!r} into {n} parts: only what is made in as many parts can be cut. Cut the rows of the "
                "data set, before the first call"
            )
        return [Handle(self._trace, self._keys, self._group, Part(k, n)) for k in range(n)]

    def decide(
        self, name: str, function: Callable[..., float], first: float = 0.0, **constants: float
    ) -> None:
        """Decide by the metrics of the call that has just made this, when it has ended: `Decision` has the meaning.

        name      what calls name in `when`, or `rows`, `evaluate` or `stop`
        function  (before, metrics, **constants) -> a number; at the top level of a module, and of nothing else
        first     `before` in the first iteration
        Raises ConfigError where the function reads anything else.
        """
        if not self._call or self._part != WHOLE:
            self._trace.refuse(
                f"decides {name!r} by {self!r}, which is not what one call has made of all samples. Decide by what a "
                "call has returned"
            )
        source = f"{function.__module__}:{function.__qualname__}"
        self._trace.decide(self._call, Decision(name=name, function=source, first=first, constants=constants))

    def __repr__(self) -> str:
        part = "" if self._part == WHOLE else f", part {self._part.number + 1} of {self._part.of}"
        return f"samples({', '.join(self._keys)}; in groups of {self._group}{part})"

    def _value(self, *_: object) -> NoReturn:
        self._trace.refuse(
            f"reads a value of {self!r}, but the graph may not depend on data. Decide by a field of the "
            "configuration, by the metrics of a call (decide), or in the function of a call"
        )

    __bool__ = __int__ = __float__ = __index__ = __len__ = __iter__ = __contains__ = __getitem__ = _value
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _value  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = (
        _value
    )
    __hash__ = _value  # type: ignore[assignment]

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python asks whether an object has these
            raise AttributeError(name)
        self._trace.refuse(
            f"asks {self!r} for {name!r}. A handle has select, union (|), repeat, chunk and decide, and no values, "
            "since the graph may not depend on data"
        )


def concat(parts: Sequence[Handle]) -> Handle:
    """All samples again, from all the parts of `chunk` in their order."""
    if not parts:
        raise ProgramError("concat joins no parts. Give it those that chunk has returned.")
    first = parts[0]
    for number, part in enumerate(parts):
        if part._part != Part(number, len(parts)) or part._keys != first._keys:
            first._trace.refuse(
                f"concatenates {len(parts)} parts, but number {number + 1} is {part!r}. Give all parts of one chunk, "
                "in their order and with the same keys"
            )
    return Handle(first._trace, first._keys, first._group)


class Model:
    """A role's model as a program sees it: each of its methods is one call of the graph, named `ROLE_generate`,
    `ROLE_inference` or `ROLE_train`, as its function is. A call gives a handle with the keys that it makes."""

    def __init__(self, trace: "Trace", role: str) -> None:
        self._trace, self.role = trace, role

    def generate(
        self,
        prompts: Handle,
        gives: Sequence[str] | None = None,
        *,
        prefix: str = "",
        name: str = "",
        when: str = "",
    ) -> Handle:
        """Responses to the prompts.

        gives   keys of the call's result; default: GENERATED, and KEPT where the configuration records them
        prefix  of the names under which these keys are stored, where the program generates twice
        name    of the call
        when    the decision by which it runs; default: it always does
        """
        given = (*GENERATED, *(KEPT if self._trace.config.records_kept else ())) if gives is None else gives
        stored = {prefix + key: key for key in given}
        name = name or f"{prefix}{self.role}_generate"
        return self._trace.record(
            name, self.role, "generate", prompts.select("prompt_ids"), stored, when=when
        )

    def score(
        self, samples: Handle, gives: Sequence[str] | None = None, *, prefix: str = "", when: str = ""
    ) -> Handle:
        """Scores of the responses, by the reward model, Python rewards, or both.

        Each sample's further columns come from the data set. Without a reward model, `models.reward` scores on the
        mesh of the configuration's `scoring_role`. Where the run has a judge, its call `judge_generate` comes
        before, and what it has replied about each sample is scored.
        gives   keys of the call's result; default: `scores`, and what else the configuration makes the call give
        prefix, when  as in `generate`; the prefix is also of the keys that are read
        """
        config = self._trace.config
        read = {prefix + key: key for key in (*SEQUENCES, "truncated")}
        given = (*scored(config), *scored_tokens(config)) if gives is None else gives
        rows = Handle(self._trace, self._trace.dataset_keys, samples._group, samples._part)
        judged = samples.select(*read) | rows.select("columns")
        if self.role == "reward" and JUDGE in config.roles():
            replies, shown = {prefix + JUDGE_REPLIES: JUDGE_REPLIES}, {prefix + key: key for key in SEQUENCES}
            asked_about = judged.select(*shown, "columns")
            name = f"{prefix}{JUDGE}_generate"
            judged |= self._trace.record(name, JUDGE, "generate", asked_about, replies, shown, when=when)
            read |= replies
        return self._trace.record(
            f"{prefix}{self.role}_inference",
            config.scoring_role if self.role == "reward" else self.role,
            "inference",
            judged,
            {prefix + key: key for key in given},
            read,
            runs_model=self.role != "reward" or config.scoring_role == "reward",
            when=when,
        )

    def logprobs(self, samples: Handle, *, when: str = "") -> Handle:
        """The log-probabilities of the responses' tokens under this model, as `ROLE_logprobs`.

        Tokens that top-k and top-p left out are left out here too, where generation has recorded them.
        """
        kept = [key for key in KEPT if key in samples.keys]
        return self.inference(
            samples.select(*SEQUENCES, *kept), {f"{self.role}_logprobs": "logprobs"}, when=when
        )

    def inference(
        self, samples: Handle, gives: Sequence[str] | Mapping[str, str], *, name: str = "", when: str = ""
    ) -> Handle:
        """A forward pass. gives: the keys that it makes, or such a key -> its name in the call's function."""
        stored = gives if isinstance(gives, Mapping) else {key: key for key in gives}
        return self._trace.record(
            name or f"{self.role}_inference", self.role, "inference", samples, stored, when=when
        )

    def compute(self, samples: Handle, gives: Sequence[str], *, name: str, when: str = "") -> Handle:
        """A function that runs no model, on the heads of a mesh of this role: with dp 1 it has all samples."""
        stored = {key: key for key in gives}
        return self._trace.record(name, self.role, "inference", samples, stored, runs_model=False, when=when)

    def train(self, samples: Handle, gives: Sequence[str] = (), *, when: str = "") -> Handle:
        """One optimizer step for each mini-batch of the samples. It reads all their keys."""
        stored = {key: key for key in gives}
        return self._trace.record(f"{self.role}_train", self.role, "train_step", samples, stored, when=when)


class Models:
    """The models of an algorithm, by role: `models.actor`."""

    def __init__(self, trace: "Trace") -> None:
        self._trace = trace

    def __getattr__(self, role: str) -> Model:
        if role.startswith("__"):
            raise AttributeError(role)
        return Model(self._trace, role)


class Trace:
    """The calls that a program makes.

    program       where the program is, for messages
    config        gives the sizes: `batch_size`, `group_size`, and `num_mini_batches` where something trains
    dataset_keys  keys of the data set
    makers        key -> the call that makes it, or DATA_SET
    """

    def __init__(self, program: str, config: Any, dataset_keys: Sequence[str]) -> None:
        self.program, self.config, self.dataset_keys = program, config, tuple(dataset_keys)
        self.makers = dict.fromkeys(self.dataset_keys, DATA_SET)
        self._roles = tuple(config.roles())
        self._calls: dict[str, ModelFunctionCall] = {}
        self._parts: dict[str, list[int]] = {}

    def refuse(self, sentence: str) -> NoReturn:
        """Raises ProgramError: the program, then what it does."""
        raise ProgramError(f"the program {self.program} {sentence}.")

    def cut(self, key: str) -> int | None:
        """The number of parts of the call that makes a key; None for a key of the data set."""
        maker = self.makers[key]
        return None if maker == DATA_SET else self._calls[maker].chunks

    def record(
        self,
        name: str,
        role: str,
        kind: CallKind,
        read: Handle,
        gives: Mapping[str, str],
        reads: Mapping[str, str] | None = None,
        runs_model: bool = True,
        when: str = "",
    ) -> Handle:
        """Record a call, or one part of it, and return the handle of what it makes.

        gives, reads  key -> its name in the call's function
        Raises ProgramError for a call that cannot be one of the graph's.
        """
        if role not in self._roles:
            self.refuse(
                f"has the call {name!r} of {role!r}, but the algorithm has no model for this role; its roles are "
                f"{_listed(self._roles)}. Name one of them, or add it to the configuration's roles()"
            )
        config, part = self.config, read._part
        if read._group != config.group_size:
            self.refuse(
                f"gives the call {name!r} groups of {read._group}, but the configuration's group_size is "
                f"{config.group_size}. Repeat the rows of the data set {config.group_size} times"
            )
        if not read.keys:
            self.refuse(f"gives the call {name!r} no keys. Give it those that it is to read")
        if kind == "train_step" and part != WHOLE:
            self.refuse(
                f"trains {name!r} on a part, but a call that trains takes all samples. Join the parts first (concat)"
            )
        call = ModelFunctionCall(
            name=name,
            role=role,
            kind=kind,
            inputs=read.keys,
            outputs=tuple(gives),
            n_seqs=config.batch_size,
            group_size=config.group_size,
            mini_batches=config.num_mini_batches if kind == "train_step" else 1,
            chunks=part.of,
            remap={key: inner for key, inner in {**gives, **(reads or {})}.items() if key != inner},
            runs_model=runs_model,
            when=when,
        )
        self._add(call, part)
        return Handle(self, gives, read._group, part, name)

    def decide(self, call: str, decision: Decision) -> None:
        """Add a decision to a call. Raises ConfigError where it would be made of more than the call's metrics."""
        pure(decision)
        made = self._calls[call]
        self._calls[call] = made.model_copy(update={"decides": (*made.decides, decision)})

    def _add(self, call: ModelFunctionCall, part: Part) -> None:
        name, before = call.name, self._calls.get(call.name)
        if before is None:
            for key in call.outputs:
                if key in self.makers:
                    self.refuse(
                        f"makes {key!r} twice, by {self.makers[key]} and by {name}. Let one of them give another key"
                    )
                self.makers[key] = name
            self._calls[name], self._parts[name] = call, [part.number]
            return
        if before.chunks != part.of or part.number in self._parts[name]:
            self.refuse(f"has the call {name!r} twice. Give one of them another name, or make it once")
        if before != call:
            self.refuse(
                f"has a call {name!r} whose parts differ. Let all parts read the same keys and give the same"
            )
        self._parts[name].append(part.number)

    def calls(self) -> list[ModelFunctionCall]:
        """The calls in the program's order.

        Raises ProgramError where a part of a call is missing, and, for a run that trains, where nothing trains and
        where what a call makes is of no use to one that trains or decides.
        """
        for name, call in self._calls.items():
            missing = sorted(set(range(call.chunks)) - set(self._parts[name]))
            if missing:
                self.refuse(
                    f"makes the call {name!r} without part {missing[0] + 1} of {call.chunks}. Make it for each part"
                )
        if isinstance(self.config, TrainingConfig):
            self._refuse_useless()
        return list(self._calls.values())

    def _refuse_useless(self) -> None:
        if not any(call.kind == "train_step" for call in self._calls.values()):
            self.refuse("trains nothing, but its configuration is one of a training. Call train of a model")
        useful = {name for name, call in self._calls.items() if call.kind == "train_step" or call.decides}
        while more := {self.makers[key] for name in useful for key in self._calls[name].inputs} - {
            DATA_SET,
            *useful,
        }:
            useful |= more
        idle = [call for name, call in self._calls.items() if name not in useful]
        if idle:
            self.refuse(
                f"has the call {idle[0].name!r}, but nothing trains on {_listed(idle[0].outputs)}. Give it to a call "
                "that trains, or leave the call out"
            )


def traced(
    dataset_keys: Sequence[str],
) -> Callable[[Callable[[Models, Handle, Any], None]], Callable[[Any], list[ModelFunctionCall]]]:
    """Make a graph of a program, by running it once with handles in place of samples.

    The program takes the models, the rows of the data set with their keys, and the configuration, on which its calls
    may depend. The graph raises ProgramError where they cannot be a graph's.
    """

    def decorate(program: Callable[[Models, Handle, Any], None]) -> Callable[[Any], list[ModelFunctionCall]]:
        def graph(config: Any) -> list[ModelFunctionCall]:
            trace = Trace(f"{program.__module__}:{program.__name__}", config, dataset_keys)
            if read := changing(program):
                trace.refuse(
                    f"reads {read!r}, by which a resumed run could have another graph. Decide by a field of the "
                    "configuration, or by the metrics of a call (decide)"
                )
            program(Models(trace), Handle(trace, dataset_keys, 1), config)
            return trace.calls()

        graph.__doc__ = program.__doc__
        return graph

    return decorate


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def rollout(models: Models, prompts: Handle, config: PolicySizes) -> Handle:
    """Responses with their scores, and with the reference's log-probabilities where the KL divergence counts."""
    samples = models.actor.generate(prompts.repeat(config.group_size))
    samples |= models.reward.score(samples)
    if config.beta > 0:
        samples |= models.ref.logprobs(samples)
    return samples


def learned(config: PolicySizes, compared: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The keys that the actor's train call reads. compared: those with which scores are compared."""
    ref = ("ref_logprobs",) if config.beta > 0 else ()
    cut = ("truncated",) if config.mask_truncated_completions else ()
    kept = KEPT if config.records_kept else ()
    return (*SEQUENCES, "old_logprobs", *ref, *scored(config), *compared, *cut, *kept)


ENVIRONMENT_REWARDS = "environment_rewards"
"""The key of the sum of an environment's rewards of a sample."""

ENVIRONMENT_FAULT = "environment_fault"
"""The key of the sentence that says how the environment failed on a sample, where such are skipped; mostly empty."""


ANSWERED = "answered_turns"
"""In segments, the key of [2 n] int64 of a sample's n turns: the tokens of each, then the digests of the answers
(`Answer.digest`)."""


TOOL_CALLS = "tool_calls"
"""The key of a sample's numbers of calls of tools: all, malformed ones, those whose tool failed."""


AGENT_COUNTS = "agent_counts"
"""The key of an episode's numbers of requests, of refused ones, of sequences, of drawn tokens that are left out."""


AGENT_COLUMNS = "agent_columns"
"""The key of what a rollout_func has returned for rewards, a JSON object: further columns of the sample's row."""


def with_environment(
    calls: Sequence[ModelFunctionCall], skips: bool, counts: Sequence[str] = (), lengths: Sequence[str] = ()
) -> list[ModelFunctionCall]:
    """The calls of a graph whose `actor_generate` an environment answers, or an agent asks.

    It also reads `columns`, the rows, and gives ENVIRONMENT_REWARDS, which the call that gives `scores` reads.
    skips    whether samples on which the environment fails are skipped: then it also gives ENVIRONMENT_FAULT, which
             the same call reads
    counts   further keys that it gives: TOOL_CALLS, AGENT_COUNTS, AGENT_COLUMNS. The same call reads them, and the
             judge
    lengths  LENGTHS, where samples are several sequences: it gives them, and all calls that read samples do so too

    Raises ConfigError where the graph draws responses in another call too, or has no scores.
    """
    others = [call.name for call in _drawing(calls) if call.name != "actor_generate"]
    if others:
        raise ConfigError(
            f"environment: this algorithm also draws responses in {others[0]!r}, which no environment answers. Leave "
            "it out, or choose another algorithm, such as grpo."
        )
    scoring = [call.name for call in calls if "scores" in call.outputs]
    if not scoring:
        raise ConfigError("environment: no call of this algorithm gives scores. Leave it out.")
    keys = (
        ENVIRONMENT_REWARDS,
        *([ENVIRONMENT_FAULT] if skips else []),
        *counts,
    )
    result = []
    for call in calls:
        inputs, outputs = (*call.inputs, *(lengths if "input_ids" in call.inputs else ())), call.outputs
        if call.name == "actor_generate":
            inputs, outputs = (*inputs, "columns"), (*outputs, *keys, *lengths)
        elif call.name in scoring:
            inputs = (*inputs, *keys)
        elif call.role == JUDGE:
            inputs = (*inputs, *counts)
        result.append(call.model_copy(update={"inputs": inputs, "outputs": outputs}))
    return result


def _drawing(calls: Sequence[ModelFunctionCall]) -> list[ModelFunctionCall]:
    """The calls that answer the data set's prompts."""
    return [call for call in calls if call.kind == "generate" and call.role != JUDGE]


DRAWN_BY = "drawn_by"
"""The key of the version of the actor that has drawn each token; -1 on the prompt."""

PROXIMAL = "proximal_logprobs"
"""The key of the log-probabilities under the actor before the train_step, the proximal policy of decoupled PPO, where
the train_step takes several optimizer steps."""

NUMBER = "number"
"""The key of the global id of the sample that ended in a place of the batch (docs/adr/0020-segments.md)."""

COLUMNS = "columns_of_number"
"""The key of the columns of that sample's row."""


def from_older_versions(calls: Sequence[ModelFunctionCall], config: PolicyConfig) -> list[ModelFunctionCall]:
    """The calls of a graph whose samples are drawn ahead, in segments, or weighted by who has drawn them.

    With staleness generation runs `config.staleness` iterations ahead, and records which version has drawn each
    token. Where tokens are weighted, and the train_step takes several optimizer steps, `actor_inference` computes the
    log-probabilities under the proximal policy (arXiv:2110.00641, section 3; arXiv:2505.24298, section 5.2), and
    `actor_train` reads them. Without all of these the calls stay as they are.
    Raises ConfigError where a graph cannot be drawn in segments.
    """
    drawn_by = (DRAWN_BY,) if config.learns_from_older else ()
    proximal = (PROXIMAL,) if config.infers_proximal else ()
    if not drawn_by and not proximal:
        return list(calls)
    segment, drawing = config.sampling.segment_tokens, _drawing(calls)
    result = list[ModelFunctionCall]()
    for call in calls:
        if call in drawing:
            drawn = drawn_by if call.name == "actor_generate" else ()
            changed = {"lead": config.staleness, "outputs": (*call.outputs, *drawn)}
            result.append(call.model_copy(update=changed))
        elif call.kind == "train_step" and call.role == "actor":
            if proximal:
                result.append(
                    ModelFunctionCall(
                        name="actor_inference",
                        role="actor",
                        kind="inference",
                        inputs=(*SEQUENCES, *(key for key in (*KEPT, LENGTHS) if key in call.inputs)),
                        outputs=proximal,
                        n_seqs=call.n_seqs,
                        group_size=call.group_size,
                        remap={PROXIMAL: "logprobs"},
                    )
                )
            result.append(call.model_copy(update={"inputs": (*call.inputs, *drawn_by, *proximal)}))
        else:
            result.append(call)
    return result if segment is None else in_segments(result, segment)


def in_segments(calls: Sequence[ModelFunctionCall], segment_tokens: int) -> list[ModelFunctionCall]:
    """The calls of a graph whose generation draws at most `segment_tokens` tokens of a sequence at a time.

    Only generation knows which sample ends in which place, so calls that read the columns of its row get them
    from there, with its number.
    Raises ConfigError for a graph that generates twice: it would compare the answers to different prompts.
    """
    drawing = _drawing(calls)
    if len(drawing) > 1:
        raise ConfigError(
            f"sampling.segment_tokens={segment_tokens}: the calls {' and '.join(c.name for c in drawing)} answer the "
            "same prompts, but in segments they would end at different times. Leave it out, or choose an algorithm "
            "that generates once, such as grpo or ppo."
        )
    result = list[ModelFunctionCall]()
    for call in calls:
        changed: dict[str, object] = {}
        if call in drawing:
            played = (ANSWERED,) if ENVIRONMENT_REWARDS in call.outputs else ()
            changed = {
                "segment_tokens": segment_tokens,
                "inputs": tuple(dict.fromkeys((*call.inputs, "columns"))),
                "outputs": (*call.outputs, *played, NUMBER, COLUMNS),
            }
        elif "columns" in call.inputs:
            inputs = (COLUMNS if key == "columns" else key for key in call.inputs)
            changed = {"inputs": (*inputs, NUMBER), "remap": {**call.remap, COLUMNS: "columns"}}
        result.append(call.model_copy(update=changed))
    return result
