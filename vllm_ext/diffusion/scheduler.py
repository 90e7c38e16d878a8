"""vLLM's scheduler for diffusion models: which requests the runtime has, and what their clients get.

The runtime batches and admits by memory itself. The scheduler hands requests to it in the order of vLLM's policy, no
more than may run at once, cuts finished blocks at end tokens, and answers vLLM's questions.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.request import Request, RequestStatus

from forebay.diffusion.errors import DiffusionError
from forebay.diffusion.families.base import end_tokens
from forebay.vllm_ext.diffusion.config import read_config
from forebay.vllm_ext.diffusion.ending import Ending, find_end
from forebay.vllm_ext.diffusion.messages import BlockDone, DiffusionOutput, DiffusionStep, Entering, Started
from forebay.vllm_ext.diffusion.metrics import RuntimeMetrics
from forebay.vllm_ext.diffusion.pace import Pace
from forebay.vllm_ext.diffusion.request import make_settings, read_options

logger = logging.getLogger(__name__)
STATUS = {Ending.STOP: RequestStatus.FINISHED_STOPPED, Ending.LENGTH: RequestStatus.FINISHED_LENGTH_CAPPED}


class DiffusionScheduler(SchedulerInterface):
    """Set by the architecture hook: see `architecture`."""

    connector = None
    ec_connector = None

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        structured_output_manager: Any,
        block_size: int,
        hash_block_size: int = 0,
        mm_registry: Any = None,
        include_finished_set: bool = False,
        log_stats: bool = False,
    ) -> None:
        self.vllm_config = vllm_config
        self.kv_cache_config = kv_cache_config
        self.log_stats = log_stats
        self.server = read_config(vllm_config.additional_config)
        self.limit = vllm_config.scheduler_config.max_num_seqs
        self.positions = vllm_config.model_config.max_model_len
        self.ends = end_tokens({"eos_token_id": vllm_config.model_config.hf_config.eos_token_id})
        self.vocabulary = vllm_config.model_config.get_vocab_size()
        self.requests: dict[str, Request] = {}
        self.waiting = create_request_queue(SchedulingPolicy(vllm_config.scheduler_config.policy))
        self.sent: dict[str, Request] = {}
        """Those that the runtime has, in the order in which it got them."""
        self.started: set[str] = set()
        """Those of them that left its queue."""
        self._leaving: list[str] = []
        self._refused: list[Request] = []
        self._forget_prefixes = False
        self._pause = PauseState.UNPAUSED
        self._pace = Pace()
        self._seeds = random.Random(vllm_config.model_config.seed)
        self._prefixes = PrefixCacheStats()
        self._metrics = RuntimeMetrics()
        self._usage = 0.0
        self._finished: dict[int, set[str]] | None = {} if include_finished_set else None

    # Requests come and go.

    def add_request(self, request: Request) -> None:
        """Queue a request."""
        self.requests[request.request_id] = request
        try:
            self._check(request)
        except DiffusionError as error:
            self._refuse(request, str(error))
            return
        self.waiting.add_request(request)
        if self.log_stats:
            request.record_event(EngineCoreEventType.QUEUED)

    def _check(self, request: Request) -> None:
        """Refuse what the front end cannot have seen to."""
        if request.sampling_params is None or request.prompt_token_ids is None:
            raise DiffusionError("a diffusion model answers prompts of tokens only, no embeddings and no pooling")
        if request.resumable:
            raise DiffusionError("a diffusion model needs its whole prompt; do not stream it")
        read_options(request.sampling_params.extra_args)

    def _refuse(self, request: Request, message: str) -> None:
        logger.warning("request %s is refused: %s", request.request_id, message)
        request.status = RequestStatus.FINISHED_ERROR
        request.stop_reason = message
        self._forget(request)
        self._refused.append(request)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """End requests whose client is gone or has seen enough, wherever they are."""
        names = self.requests if request_ids is None else [request_ids] if isinstance(request_ids, str) else request_ids
        ended = [self.requests[name] for name in dict.fromkeys(names) if name in self.requests]
        for request in ended:
            request.status = finished_status
            self._forget(request)
        return ended

    def _forget(self, request: Request) -> None:
        name = request.request_id
        del self.requests[name]
        self.started.discard(name)
        if self.sent.pop(name, None) is not None:
            self._leaving.append(name)
        elif request in self.waiting:
            self.waiting.remove_request(request)
        if self._finished is not None:
            self._finished.setdefault(request.client_index, set()).add(name)

    # One step.

    def schedule(self, throttle_prefills: bool = False) -> DiffusionStep:
        """Hand over what came and went since the last step."""
        step = DiffusionStep.make_empty()
        step.leaving, self._leaving = self._leaving, []
        step.finished_req_ids = set(step.leaving)
        step.forget_prefixes, self._forget_prefixes = self._forget_prefixes, False
        if self._pause == PauseState.UNPAUSED:
            step.entering = self._hand_over()
        if self._pause != PauseState.PAUSED_ALL and self.sent:
            step.passes = self._pace.passes
            step.num_scheduled_tokens = dict.fromkeys(self.sent, 1)
            step.total_num_scheduled_tokens = len(self.sent)
        self._pace.start()
        return step

    def _hand_over(self) -> list[Entering]:
        """None while the runtime has some that it has no memory for yet: who comes first may change until then."""
        if len(self.started) < len(self.sent):
            return []
        entering = []
        while self.waiting and len(self.sent) < self.limit:
            request = self.waiting.pop_request()
            try:
                entering.append(self._entering(request))
            except DiffusionError as error:
                self._refuse(request, str(error))
                continue
            request.status = RequestStatus.RUNNING
            self.sent[request.request_id] = request
        return entering

    def _entering(self, request: Request) -> Entering:
        params, prompt = request.sampling_params, request.prompt_token_ids
        length = max(1, min(request.max_tokens, self.positions - len(prompt)))
        request.max_tokens = length
        settings = make_settings(params, self.server, length, self._seeds.getrandbits(31), self.vocabulary)
        prefix = read_options(params.extra_args).prefix
        return Entering(request.request_id, prompt, settings, None if prefix is None else min(prefix, len(prompt)))

    def update_from_output(
        self, scheduler_output: DiffusionStep, model_runner_output: DiffusionOutput
    ) -> dict[int, EngineCoreOutputs]:
        """What clients get of a step."""
        found = model_runner_output
        self._pace.end(found.passes)
        self._metrics.note(found.counts)
        self._usage = found.counts.usage
        for started in found.started:
            self._note_start(started)
        for name, message in found.failed.items():
            if name in self.requests:
                self._refuse(self.requests[name], message)
        outputs: dict[int, list[EngineCoreOutput]] = {}
        for request in self._refused:
            outputs.setdefault(request.client_index, []).append(self._output(request, [], None))
        self._refused = []
        for block in found.blocks:
            if (request := self.requests.get(block.name)) is not None:
                outputs.setdefault(request.client_index, []).append(self._take(request, block))
        return self._pack(outputs)

    def _note_start(self, started: Started) -> None:
        request = self.requests.get(started.name)
        if request is None:
            return
        self.started.add(started.name)
        self._prefixes.record(request.num_prompt_tokens, started.cached, preempted=False)
        if request.prefill_stats is not None:
            request.prefill_stats.set(request.num_prompt_tokens, started.cached, 0)
        if self.log_stats:
            request.record_event(EngineCoreEventType.SCHEDULED)

    def _take(self, request: Request, block: BlockDone) -> EngineCoreOutput:
        """Append a block to an answer, up to where the answer ends."""
        ending, count, reason = find_end(
            request.sampling_params, self.ends, block.tokens, request.num_output_tokens, block.last
        )
        tokens = block.tokens[:count]
        request.append_output_token_ids(tokens)
        logprobs = block.logprobs and block.logprobs.slice_request(0, count)
        if ending is not None:
            request.status, request.stop_reason = STATUS[ending], reason
            if block.last:
                del self.sent[request.request_id]
            self._forget(request)
        return self._output(request, tokens, logprobs)

    def _output(self, request: Request, tokens: list[int], logprobs: Any) -> EngineCoreOutput:
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=tokens,
            new_logprobs=logprobs,
            finish_reason=request.get_finished_reason(),
            stop_reason=request.stop_reason,
            events=request.take_events(),
            prefill_stats=request.take_prefill_stats(),
            trace_headers=request.trace_headers,
        )

    def _pack(self, outputs: dict[int, list[EngineCoreOutput]]) -> dict[int, EngineCoreOutputs]:
        packed = {client: EngineCoreOutputs(outputs=found) for client, found in outputs.items()}
        if self._finished:
            for client, names in self._finished.items():
                packed.setdefault(client, EngineCoreOutputs()).finished_requests = names
            self._finished = {}
        if (stats := self.make_stats()) is not None:
            first = next(iter(packed.values()), None) or packed.setdefault(0, EngineCoreOutputs())
            first.scheduler_stats = stats
        return packed

    # Questions of the engine.

    def get_num_unfinished_requests(self) -> int:
        """Those that can go on."""
        if self._pause == PauseState.PAUSED_ALL:
            return 0
        return len(self.sent) if self._pause == PauseState.PAUSED_NEW else len(self.requests)

    def has_finished_requests(self) -> bool:
        """Whether there is something to tell the workers or a client, whatever runs."""
        return bool(self._leaving or self._refused or self._forget_prefixes)

    def get_request_counts(self) -> tuple[int, int]:
        """Running and waiting."""
        return len(self.started), len(self.requests) - len(self.started)

    def make_stats(self) -> SchedulerStats | None:
        """For vLLM's metrics and ours: see `metrics`."""
        if not self.log_stats:
            return None
        running, waiting = self.get_request_counts()
        prefixes, self._prefixes = self._prefixes, PrefixCacheStats()
        return SchedulerStats(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            kv_cache_usage=self.get_kv_cache_usage(),
            prefix_cache_stats=prefixes,
            kv_connector_stats=self._metrics.take(),
        )

    def get_kv_cache_usage(self) -> float:
        """Share of the memory for requests that they take, 0 to 1."""
        return self._usage

    @property
    def pause_state(self) -> PauseState:
        """Whether new requests, or all, wait."""
        return self._pause

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pause or go on."""
        self._pause = pause_state

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Have the workers forget the states of all prefixes that nothing uses; true when that is all of them."""
        self._forget_prefixes = True
        self._prefixes.reset = True
        return not self.started

    def reset_encoder_cache(self) -> None:
        """There is none."""

    def get_grammar_bitmask(self, scheduler_output: Any) -> None:
        """There is none."""

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """There are none."""

    def update_draft_token_ids_in_output(self, draft_token_ids: Any, scheduler_output: Any) -> None:
        """There are none."""

    def shutdown(self) -> None:
        """Nothing is held."""
