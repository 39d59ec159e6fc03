"""A `rollout_func` of TRL's as an agent: `agent: {command: "trl:file.py:function"}` (docs/how-to/agents.md).

As in TRL it is called with prompts and a trainer, and returns `prompt_ids`, `completion_ids`, `logprobs` and further
fields, which rewards get. Here it is called for each response alone, with a list of one prompt. The trainer is a
stand-in that asks the endpoint, under the names by which TRL's own trainer asks vLLM. What the endpoint has recorded
is the sample; what is returned must agree with it.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NoReturn
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from prefect_rlhf.rlhf_tasks.config.functions import is_pickled, unpickled
from prefect_rlhf.rlhf_tasks.user_code.environment_kinds.random_state import RandomState
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError
from prefect_rlhf.rlhf_tasks.user_code.forms import module_at, plain

RETURNED = ("prompt_ids", "completion_ids", "logprobs")
"""What a rollout_func must return, a list of one each."""
REWARD = "env_reward"
"""The field that is the reward where the run has no other, as TRL's documentation names it."""
AT_ONCE = 64  # requests of one call
TOO_LONG = "context_length_exceeded"


def play(settings: str) -> None:
    """Play the episode that standard input names, and say its fields. Exits with a sentence where it fails.

    settings  JSON: `function`: where it is; `tokenizer`: a folder; `sampling`: the run's; `step`: iterations that
              are finished; `is_scored`: whether the run has rewards of its own
    """
    stated = json.loads(settings)
    row = json.loads(sys.stdin.readline())
    trainer = Trainer(stated)
    with RandomState(int(os.environ["AGENT_SEED"])).used():
        returned = function_at(stated["function"])([row["prompt"]], trainer)
    try:
        fields = fields_of(returned, trainer.vllm_generation.vllm_client.drawn)
    except ValueError as error:
        sys.exit(f"rollout_func {error}")
    try:
        post("/columns", fields)
    except ValueError as error:
        sys.exit(f"rewards cannot get the fields that rollout_func returned: {error}")
    if REWARD in fields and not stated["is_scored"]:
        print(f"\n{json.dumps({'reward': fields[REWARD]})}")


def function_at(location: str) -> Callable[..., Any]:
    """The function at `file.py:name`, `module:name` or `FILE.pickle:name`."""
    place, _, name = location.rpartition(":")
    try:
        function = (
            unpickled(Path(place))
            if is_pickled(location)
            else getattr(module_at(place, "agents"), name, None)
        )
    except RewardError as error:
        sys.exit(str(error))
    if not callable(function):
        sys.exit(f"{place} has no function {name!r}")
    return function


def fields_of(returned: Any, drawn: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The fields for rewards in what a rollout_func has returned for one prompt.

    drawn  tokens of all answers of the policy, in the order in which they were asked for
    Raises ValueError, as the rest of a sentence, for what TRL would not take, and for what does not agree with them.
    """
    if not isinstance(returned, Mapping):
        raise ValueError(f"must return a dict, found {type(returned).__name__}.")
    if missing := sorted(set(RETURNED) - set(returned)):
        raise ValueError(f"must return keys {missing} in its output dict.")
    fields = {str(key): plain(value) for key, value in returned.items()}
    of_one = {
        key: _only(key, value)
        for key, value in fields.items()
        if key not in ("logprobs", "env_mask") or value is not None
    }
    ids = of_one["completion_ids"]
    mask = of_one.pop("env_mask", [1] * len(ids))
    for key, values in (("logprobs", of_one.get("logprobs", ids)), ("env_mask", mask)):
        if len(values) != len(ids):
            raise ValueError(f"returned {len(values)} {key} for {len(ids)} completion_ids.")
    learned = [token for token, is_drawn in zip(ids, mask, strict=True) if is_drawn]
    _refuse_other(learned, [token for answer in drawn for token in answer])
    return {key: value for key, value in of_one.items() if key not in (*RETURNED, "logprob_token_ids")}


def _only(key: str, value: Any) -> Any:
    """A field of the one completion. Raises ValueError where there are more, or none."""
    is_of_tokens = key in (*RETURNED, "env_mask")
    if not isinstance(value, list | tuple):
        if is_of_tokens:
            raise ValueError(f"must return a list as {key}, found {type(value).__name__}.")
        return value  # TRL gives such to all
    if len(value) == 1 and is_of_tokens and not isinstance(plain(value[0]), list | tuple):
        raise ValueError(f"must return a list of lists as {key}, found [{type(value[0]).__name__}].")
    if len(value) != 1:
        raise ValueError(
            f"returned {len(value)} {key} for one prompt: it gets a list of one, and trainer.num_generations is 1."
        )
    return plain(value[0])


def _refuse_other(learned: Sequence[int], drawn: Sequence[int]) -> None:
    if learned != drawn:
        same = (place for place, both in enumerate(zip(learned, drawn, strict=False)) if both[0] != both[1])
        place = next(same, min(len(learned), len(drawn)))
        raise ValueError(
            f"returned {len(learned)} completion_ids whose env_mask is 1, and the policy drew {len(drawn)} tokens; "
            f"they differ from number {place + 1} on. Return all that it drew, in this order, and give what it did "
            "not draw a 0 in env_mask."
        )


class Part:
    """An object of TRL's, with some of its attributes. Any other is an AttributeError of one sentence."""

    _NAME = "trainer"

    def __getattr__(self, name: str) -> NoReturn:
        names = sorted(each for each in {*vars(self), *dir(type(self))} if not each.startswith("_"))
        raise AttributeError(
            f"{self._NAME}.{name} is not here: the model and its optimizer are on the ranks of the run. Draw by "
            f"trainer.vllm_generation.generate; {self._NAME} has {', '.join(names)}."
        )


class Trainer(Part):
    """What a rollout_func may use of TRL's trainer, with values of the run. settings: as of `play`"""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        sampling: Mapping[str, Any] = settings["sampling"]
        self._tokenizer = settings["tokenizer"]
        self.args, self.state, self.accelerator = Arguments(sampling), State(settings["step"]), Accelerator()
        self.temperature, self.top_p = sampling["temperature"], sampling["top_p"]
        self.top_k, self.min_p, self.repetition_penalty = sampling["top_k"], None, 1.0
        self.max_completion_length = sampling["max_completion_length"]
        self.num_generations = self.num_generations_eval = 1  # of each prompt that it is given
        self.chat_template, self.chat_template_kwargs, self.tools = None, dict[str, Any](), list[Any]()
        self.use_vllm, self.vllm_mode, self.vllm_tensor_parallel_size = True, "server", 1
        self.vllm_generation = Generation(Client(sampling))

    @cached_property
    def processing_class(self) -> Any:
        """The tokenizer, as transformers loads it."""
        return tokenizer_at(self._tokenizer)


@cache
def tokenizer_at(folder: str) -> Any:
    """A folder's tokenizer, as transformers loads it."""
    from transformers import AutoTokenizer  # here, since it takes seconds

    return AutoTokenizer.from_pretrained(folder)


class Arguments(Part):
    """`trainer.args`."""

    _NAME = "trainer.args"

    def __init__(self, sampling: Mapping[str, Any]) -> None:
        for name in ("max_completion_length", "temperature", "top_p", "top_k"):
            setattr(self, name, sampling[name])
        self.min_p, self.repetition_penalty, self.num_generations = None, 1.0, 1
        self.generation_kwargs, self.report_to, self.vllm_enable_sleep_mode = None, list[str](), False


class State(Part):
    """`trainer.state`."""

    _NAME = "trainer.state"

    def __init__(self, step: int) -> None:
        self.global_step = step


class Accelerator(Part):
    """`trainer.accelerator`, of the one process that plays."""

    _NAME = "trainer.accelerator"

    def __init__(self) -> None:
        self.is_main_process, self.process_index, self.num_processes = True, 0, 1


class Generation(Part):
    """`trainer.vllm_generation`."""

    _NAME = "trainer.vllm_generation"

    def __init__(self, client: "Client") -> None:
        self.vllm_client, self.mode, self.structured_outputs_regex = client, "server", None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        images: Sequence[Any] | None = None,
        num_generations: int = 1,
        profiler: Any = None,
    ) -> tuple[Any, Any, Any, Any]:
        """An answer to each prompt: as in TRL, one that is to have several stands there as often."""
        if any(images or ()):
            raise ValueError("images: models of a run read text alone. Leave them out.")
        output = self.vllm_client.generate(prompts, max_tokens=self.vllm_client.longest)
        return tuple(output[key] for key in (*RETURNED, "logprob_token_ids"))  # pyright: ignore[reportReturnType]


class Client(Part):
    """`trainer.vllm_generation.vllm_client`. What is stated of sampling must be as the run draws: the endpoint
    refuses any other.

    longest  tokens of a response
    drawn    tokens of each answer, in the order in which they were asked for
    """

    _NAME = "trainer.vllm_generation.vllm_client"

    def __init__(self, sampling: Mapping[str, Any]) -> None:
        self.longest: int = sampling["max_completion_length"]
        self.drawn: list[list[int]] = []
        self._as_run = {"top_k": sampling["top_k"] or -1, "min_p": 0.0, "repetition_penalty": 1.0}

    def generate(
        self, prompts: Sequence[Any], n: int = 1, max_tokens: int = 16, **stated: Any
    ) -> dict[str, Any]:
        """`n` answers to each prompt, a text or ids of tokens."""
        bodies = [{"prompt": plain(prompt)} for prompt in prompts]
        choices = [each["choices"] for each in self._answers("/completions", bodies, n, max_tokens, stated)]
        values = [[one["logprobs"]["token_logprobs"] for one in each] for each in choices]
        return _output([each[0]["prompt_token_ids"] for each in choices], choices, values)

    def chat(
        self,
        messages: Sequence[Any],
        n: int = 1,
        max_tokens: int = 16,
        tools: Sequence[Any] | None = None,
        max_concurrent_requests: int = AT_ONCE,
        **stated: Any,
    ) -> dict[str, Any]:
        """`n` answers to each conversation."""
        bodies = [{"messages": conversation} for conversation in messages]
        if tools:
            from transformers.utils.chat_template_utils import get_json_schema

            stated["tools"] = [get_json_schema(tool) if callable(tool) else tool for tool in tools]
        choices = [
            each["choices"] for each in self._answers("/chat/completions", bodies, n, max_tokens, stated)
        ]
        values = [
            [[token["logprob"] for token in one["logprobs"]["content"]] for one in each] for each in choices
        ]
        return _output([each[0]["prompt_token_ids"] for each in choices], choices, values)

    def _answers(
        self, path: str, bodies: Sequence[Mapping[str, Any]], n: int, most: int, stated: dict[str, Any]
    ) -> list[dict[str, Any]]:
        stated |= stated.pop("generation_kwargs", None) or {}
        if stated.pop("logprobs", None):
            raise ValueError(
                "logprobs: only those of the tokens that were drawn are known here. Leave it out."
            )
        if stated.get("top_k") == 0:  # all, as -1
            stated["top_k"] = -1
        n, most = stated.pop("n", n), stated.pop("max_tokens", most)
        unset = (None, {}, [])
        others = {
            name: value
            for name, value in stated.items()
            if value not in unset and self._as_run.get(name) != value
        }
        every = [{**body, **others, "n": n, "logprobs": True, "return_token_ids": True} for body in bodies]
        with ThreadPoolExecutor(min(len(every), AT_ONCE) or 1) as threads:
            answers = list(threads.map(partial(self._answered, path, most), every))
        self.drawn += [one["token_ids"] for answer in answers for one in answer["choices"]]
        return answers

    def _answered(self, path: str, most: int, body: Mapping[str, Any]) -> Any:
        """An answer of so many tokens, or of as many as there is room for, as vLLM gives it; of none where there is
        no room: the episode is cut, as TRL cuts one of tools."""
        for limit in [{"max_tokens": most}, {}] if most < self.longest else [{}]:
            try:
                return post(path, {**body, **limit})
            except Refused as error:
                if error.code != TOO_LONG:
                    raise
        read = body.get("prompt", "")
        nothing = {"token_ids": [], "logprobs": {"token_logprobs": [], "content": []}}
        return {
            "choices": [{**nothing, "prompt_token_ids": [] if isinstance(read, str) else read}] * body["n"]
        }


def _output(
    prompt_ids: list[Any], choices: Sequence[Sequence[Any]], values: Sequence[Sequence[Any]]
) -> dict[str, Any]:
    """As TRL's client gives it: log-probabilities and ids of one alternative for each token, the drawn one."""
    ids = [one["token_ids"] for each in choices for one in each]
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": ids,
        "logprobs": [[[value] for value in one] for each in values for one in each],
        "logprob_token_ids": [[[token] for token in one] for one in ids],
    }


class Refused(ValueError):
    """A request that the endpoint has refused. code: of the API"""

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__(error["message"])
        self.code = error["code"]


def post(path: str, body: Any) -> Any:
    """What the endpoint answers; agent.timeout_s bounds the wait. Raises Refused, and ValueError for what JSON
    cannot say."""
    try:
        text = json.dumps(body, default=_listed)
    except TypeError as error:
        raise ValueError(f"{error} is no number, text, list or dict.") from None
    key = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    try:
        with urlopen(Request(os.environ["OPENAI_BASE_URL"] + path, text.encode(), key)) as answer:
            return json.load(answer)
    except HTTPError as error:
        raise Refused(json.load(error)["error"]) from None


def _listed(value: Any) -> Any:
    listed = plain(value)
    if listed is value:
        raise TypeError(f"a {type(value).__name__}")
    return listed
