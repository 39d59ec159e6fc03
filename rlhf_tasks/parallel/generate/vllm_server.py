"""vLLM in a process of its own, in the interpreter of another environment: answers the requests of `vllm_process.py`.

Requests and replies are lines of JSON. The first request has what vLLM begins with (`_begun`); the reply is
`{"vllm": ..., "torch": ...}`, their versions. Then

- `{"take": {...}}`, what `Handover.write` returns: the weights are taken from memory that ranks share, and no key or
  value of older weights is used again. The reply has `version` and `digests` of what was taken;
- `{"draw": {...}}`: replies `{"drawn": tokens}` about every second, and then
  `{"answers": [[ids, logprobs, reason], ...]}`
  in the order of the requests;
- `{"sleep": true}`, on GPUs: free what can be freed until the next `take`. The reply is `{}`;
- `{"fault": ..., "traceback": ...}` is the reply to what fails. The process then ends.

Nothing of the run's environment is here: only this package, torch and vLLM of the other one.
"""

import time
import traceback
from collections.abc import Mapping
from typing import Any

from prefect_rlhf.rlhf_tasks.parallel.comm.shared_weights import assembled, digests_of, parts_of
from prefect_rlhf.rlhf_tasks.parallel.generate.beside import BLOCK_ON_CPUS
from prefect_rlhf.rlhf_tasks.system.child_pipes import Requests

SAY_EVERY_S = 1.0
LEAST_FREE = 0.01
"""The share of a GPU's memory without which vLLM does not begin, 0.92 by default: there ours has most of it. With
`kv_cache_memory_bytes` it says nothing else (vllm/v1/worker/gpu_worker.py)."""
MOST_TRACEBACK = 8000  # characters


def serve() -> None:
    """Answer requests until standard input is closed, or one fails."""
    requests = Requests()
    lines = iter(requests)
    try:
        server = _Server(next(lines), requests)
        requests.reply(server.versions)
        for request in lines:
            ((what, value),) = request.items()
            requests.reply(getattr(server, what)(value))
    except Exception as error:  # noqa: BLE001 - vLLM may raise anything; the rank says it
        trace = traceback.format_exc()[-MOST_TRACEBACK:]
        requests.reply({"fault": f"{type(error).__name__}: {error}", "traceback": trace})


class _Server:
    def __init__(self, begin: Mapping[str, Any], requests: Requests) -> None:
        import torch
        import vllm  # pyright: ignore[reportMissingImports]
        from vllm import LLM  # pyright: ignore[reportMissingImports]

        self._requests, self._sleeps = requests, begin["sleeps"]
        self.versions = {"vllm": vllm.__version__, "torch": torch.__version__}
        self._asleep = False
        self._llm: Any = LLM(
            begin["folder"],
            tokenizer=begin["tokenizer"],
            dtype=begin["dtype"],
            tensor_parallel_size=begin["tp"],
            max_model_len=begin["most_tokens"],
            kv_cache_memory_bytes=begin["kv_bytes"],
            gpu_memory_utilization=LEAST_FREE,
            enforce_eager=not begin["sleeps"],  # on CPUs, compiling takes longer than it saves
            enable_sleep_mode=begin["sleeps"],
            load_format="dummy",  # the weights come by `take`
            logprobs_mode="processed_logprobs",  # of the distribution drawn from
            worker_extension_cls=f"{__name__}:{TakesWeights.__name__}".replace(":", "."),
            generation_config="vllm",  # not the folder's: the run says how responses are sampled
            seed=0,  # each request has its own
            disable_log_stats=True,
            enable_prefix_caching=True,
            **({} if begin["sleeps"] else {"block_size": BLOCK_ON_CPUS}),
        )
        if begin["tokens"] is not None:
            self._llm.collective_rpc("draw_only_below", args=(begin["tokens"],))

    def take(self, handed: Mapping[str, Any]) -> dict[str, Any]:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False
        taken = self._llm.collective_rpc("take_weights", args=(dict(handed),))
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM keeps keys and values of older weights")
        others = [one for one in taken if any(one[what] != handed[what] for what in one)]
        return (others or taken)[0]

    def sleep(self, _: Any) -> dict[str, Any]:
        if self._sleeps and not self._asleep:
            self._llm.sleep(level=2)
            self._asleep = True
        return {}

    def draw(self, order: Mapping[str, Any]) -> dict[str, Any]:
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

        engine, answers = self._llm.llm_engine, dict[str, list[Any]]()
        for number, (prompt, seed, most) in enumerate(order["requests"]):
            params = SamplingParams(
                **order["sampling"],
                max_tokens=most,
                seed=seed,
                logprobs=0,
                ignore_eos=True,  # its stop ids are among those of the run
                include_stop_str_in_output=True,
                detokenize=bool(order["sampling"]["stop"]),
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        said_s, finished = time.monotonic(), 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    (drawn,) = output.outputs
                    logprobs = [
                        of[token].logprob for of, token in zip(drawn.logprobs, drawn.token_ids, strict=True)
                    ]
                    answers[output.request_id] = [list(drawn.token_ids), logprobs, drawn.finish_reason]
                    finished += len(logprobs)
            if time.monotonic() - said_s > SAY_EVERY_S:
                said_s = time.monotonic()
                waiting = engine.output_processor.request_states.values()
                tokens = sum(state.detokenizer.num_output_tokens() for state in waiting)
                self._requests.reply({"drawn": finished + tokens})
        return {"answers": [answers[str(number)] for number in range(len(order["requests"]))]}


class TakesWeights:
    """What is added to vLLM's worker: there is one in each process of its tensor parallelism."""

    model_runner: Any
    device: Any

    def take_weights(self, handed: Mapping[str, Any]) -> dict[str, Any]:
        """Load the weights from memory that ranks share. vLLM fuses and cuts them itself. Returns what `take` does.

        A worker reads all tensors, and copies the part that is its own. Those of a module are in its memory at once.
        """
        import torch

        parts = parts_of(handed)
        digests = digests_of(parts)
        weights = assembled(parts, handed["shapes"], self.device)
        self.model_runner.reload_weights(weights_iterator=weights)
        for module in self.model_runner.get_model().modules():
            # On CPUs vLLM packs weights. A head that is tied to the embedding is not among those that it loads
            # again: its packed copy would be of the first weights.
            if hasattr(module, "cpu_linear") and module.weight.numel():
                module.quant_method.process_weights_after_loading(module)
            # It packs those of experts too, but only the first time.
            experts = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
            if experts is not None and self.device.type == "cpu":
                experts.fused_experts.process_weights_after_loading(module)
        for device in {self.device, *(part.device for of in parts.values() for _, part in of)}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # all has been read: the ranks may change it
        del parts, weights
        torch.cuda.empty_cache()  # of what was assembled; without GPUs it does nothing
        return {"version": handed["version"], "digests": digests}

    def draw_only_below(self, tokens: int) -> None:
        """No further ids than the first `tokens` are drawn: the tokenizer does not have them."""
        model = self.model_runner.get_model()
        compute = model.compute_logits

        def bounded(*args: Any, **kwargs: Any) -> Any:
            logits = compute(*args, **kwargs)
            if logits is not None:
                logits[..., tokens:] = float("-inf")
            return logits

        model.compute_logits = bounded
