"""A real `vllm serve` in a process of its own, and a client that measures time to first token."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from forebay.storage.errors import ForebayError

START_LIMIT = 600.0
"""Seconds that a server may take to start (loading and warming up on a loaded machine)."""


class Answer(NamedTuple):
    """One answer of the server."""

    text: str
    ttft: float
    """Seconds from sending the request to the first token."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were not recomputed."""


class ServerError(ForebayError):
    """The server did not start or did not answer."""


class VllmServer:
    """`vllm serve` with forebay's connector, as a context manager.

    Args:
        model: folder of the model.
        pool: path of the pool's configuration; None serves without forebay.
        log: file for the server's output.
        kv_cache_gib: memory for the engine's own KV cache.
        arguments: more arguments of `vllm serve`.
        environment: more environment variables.
    """

    def __init__(
        self,
        model: Path,
        pool: Path | Mapping[str, Any] | None,
        log: Path,
        *,
        kv_cache_gib: int = 1,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.model = model
        self.log = log
        self.port = _free_port()
        self._command = [
            sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model),
            "--served-model-name", "model", "--host", "127.0.0.1", "--port", str(self.port),
            "--dtype", best_dtype(), "--enforce-eager", "--enable-prompt-tokens-details",
            *arguments,
        ]  # fmt: skip
        if pool is not None:
            self._command += ["--kv-transfer-config", json.dumps(transfer_config(pool))]
        self._environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
            **(environment or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start and wait until the server is healthy.

        Raises:
            ServerError: it ended or did not answer in time; the message shows the end of its log.
        """
        self.launch()
        assert self._process is not None
        end = time.monotonic() + START_LIMIT
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > end:
                self.stop()
                tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
                raise ServerError(f"the server did not start; the end of {self.log}:\n{tail}")
            time.sleep(0.25)

    def launch(self) -> None:
        """Start, unless that was done, without waiting."""
        if self._process is not None:
            return
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command, stdout=output, stderr=subprocess.STDOUT, env=self._environment, start_new_session=True
            )

    def stop(self) -> None:
        """Stop cleanly, as Ctrl-C would; kill what is left after 30 s."""
        if self._process is None:
            return
        process, self._process = self._process, None
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            self._kill(process)

    def kill(self) -> None:
        """Kill the server and its children at once (SIGKILL)."""
        if self._process is not None:
            process, self._process = self._process, None
            self._kill(process)

    def ask(self, prompt: str, *, max_tokens: int = 16, extra: Mapping[str, Any] | None = None) -> Answer:
        """A greedy completion of `prompt`, streamed.

        Raises:
            ServerError: the server refused or broke off.
        """
        body = {
            "model": "model",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **(extra or {}),
        }
        started = time.monotonic()
        first = 0.0
        text = ""
        usage: dict[str, Any] = {}
        with self._post("/v1/completions", body) as response:
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise ServerError(f"the server answered: {event['error']}")
                for choice in event.get("choices", ()):
                    first = first or time.monotonic() - started
                    text += choice["text"]
                usage = event.get("usage") or usage
        details = usage.get("prompt_tokens_details") or {}
        return Answer(text, first, usage.get("prompt_tokens", 0), details.get("cached_tokens") or 0)

    def drop_engine_cache(self) -> None:
        """Empty the engine's own prefix cache; the pool keeps what it has.

        Raises:
            ServerError: blocks stayed in use for a minute.
        """
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with self._post("/reset_prefix_cache", {}) as response:
                if json.load(response)["success"]:
                    return
            time.sleep(0.1)
        raise ServerError("the engine's prefix cache could not be emptied for 60 s: requests still hold blocks")

    def metrics(self, prefix: str = "forebay:") -> dict[str, float]:
        """Prometheus metrics whose names begin with `prefix`: sum over labels by `name`, and each `name{labels}`."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        found: dict[str, float] = {}
        for line in lines:
            if line.startswith(prefix):
                name, _, value = line.rpartition(" ")
                found[name] = float(value)
                short = name.partition("{")[0]
                if short != name:
                    found[short] = found.get(short, 0.0) + float(value)
        return found

    def wait_for_stores(self, quiet: float = 1.0, limit: float = 60.0) -> None:
        """Wait until no bytes have been stored for `quiet` seconds."""
        end = time.monotonic() + limit
        last, since = -1.0, time.monotonic()
        while time.monotonic() < end:
            stored = self.metrics().get("forebay:kv_device_write_bytes_total", 0.0)
            if stored != last:
                last, since = stored, time.monotonic()
            elif time.monotonic() - since >= quiet:
                return
            time.sleep(0.2)

    def _healthy(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2):
            return True
        return False

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            return urllib.request.urlopen(request, timeout=900)
        except urllib.error.HTTPError as error:
            raise ServerError(f"{path}: HTTP {error.code}: {error.read().decode(errors='replace')[:300]}") from None
        except OSError as error:
            raise ServerError(f"{path}: {error}; see {self.log}") from None

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def transfer_config(pool: Path | Mapping[str, Any]) -> dict[str, Any]:
    """The value of `--kv-transfer-config` for a pool."""
    return {
        "kv_connector": "ForebayConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"pool": dict(pool) if isinstance(pool, Mapping) else str(pool)},
    }


def best_dtype() -> str:
    """bfloat16 where the CPU multiplies it (AVX512-BF16, AMX), else float32, which is several times faster there."""
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    return "bfloat16" if {"avx512_bf16", "amx_bf16", "bf16"} & set(flags) else "float32"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
