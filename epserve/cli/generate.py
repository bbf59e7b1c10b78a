"""`epserve generate`: text from a model whose attention runs here and whose experts run in a service.

Without `--target` a service of the model is started for it on this machine, and ends with it.
"""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from epserve.errors import ConfigError, NotReady

from .admin import Authority, Certificate, Key, Name, tls_of
from .config_target import load_target, parse_overrides

if TYPE_CHECKING:
    from epserve.client import ClientOptions

PR_SET_PDEATHSIG = 1  # prctl(2)
STOP_S = 60.0
LOG_LINES = 12
"""Of a service that does not start."""


def generate(
    model: Annotated[
        str, typer.Argument(help="Model folder, ORG/NAME of a downloaded model, or YAML file of a service.")
    ],
    prompt: Annotated[str, typer.Argument(help="The prompt. - reads it from standard input.")],
    target: Annotated[
        str | None, typer.Option(help="host:port of a service of this model. Default: one is started on this machine.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.", min=1)] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.", min=0.0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    chat: Annotated[bool, typer.Option(help="Use the tokenizer's chat template, where it has one.")] = True,
    gate: Annotated[str, typer.Option(help="local, or remote: gate and shared experts in the service too.")] = "local",
    retry_for: Annotated[float, typer.Option(help="Seconds to wait for a service that is away.", min=0.001)] = 120.0,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key of the service that is started here.")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File whose first word is the bearer token.", exists=True, dir_okay=False, readable=True),
    ] = None,
    tls_ca: Authority = None,
    tls_cert: Certificate = None,
    tls_key: Key = None,
    tls_name: Name = "",
) -> None:
    """Generate text with this model: attention here, experts in a service. The text comes as it is made."""
    from epserve.client import ClientOptions
    from epserve.config import read_token

    if target is not None and set_:
        raise ConfigError("--set is for the service that is started here, and --target names another one; set it there")
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise ConfigError("prompt: is empty; give some text, or - for standard input")
    options = ClientOptions(
        token=read_token(token_file) if token_file else "", tls=tls_of(tls_ca, tls_cert, tls_key, tls_name)
    )
    path = load_target(model, parse_overrides(set_))[0].model.path
    asked = Asked(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, chat=chat)
    with ExitStack() as stack:
        address = target or stack.enter_context(service_of(model, set_ or []))
        stream(path, text, address, asked, options=options, gate=gate, retry_for_s=retry_for)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is to be generated: the options of the command."""

    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    chat: bool = True


def stream(
    path: Path, text: str, address: str, asked: Asked, *, options: ClientOptions, gate: str, retry_for_s: float
) -> None:
    """Writes the text to standard output as it is made, then figures to standard error. Raises EpserveError."""
    try:
        import transformers

        import epserve.transformers
    except ImportError as error:
        raise ConfigError(f"generate: {error.name} is not installed; pip install 'epserve[transformers]'") from None
    import torch

    from epserve.protocol.wire import DTYPE_NAMES

    transformers.utils.logging.disable_progress_bar()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{path} has no tokenizer that transformers reads: {reason}") from error
    with (
        epserve.transformers.connect(address, options=options, gate=gate, retry_for_s=retry_for_s) as service,
        torch.no_grad(),
    ):
        dtype = getattr(torch, DTYPE_NAMES[service.model.dtype])
        place = {"device_map": "auto"} if torch.cuda.is_available() else {}
        model = epserve.transformers.from_pretrained(path, service, dtype=dtype, **place).eval()
        inputs = _inputs(tokenizer, text, asked.chat).to(model.device)
        sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if asked.temperature > 0:
            torch.manual_seed(asked.seed)
            sampling = {"do_sample": True, "temperature": asked.temperature}
        shown = _streamer(tokenizer)
        model.generate(**inputs, **sampling, max_new_tokens=asked.max_new_tokens, streamer=shown)
        here = sum(parameter.nbytes for parameter in model.parameters()) / 2**30
        print(
            f"{shown.figures()}; {here:.2f} GiB of weights here, the experts of {len(service.model.layers)} layers at {address}",
            file=sys.stderr,
        )


def _inputs(tokenizer: Any, text: str, chat: bool) -> Any:
    if not (chat and tokenizer.chat_template):
        return tokenizer([text], return_tensors="pt", return_token_type_ids=False)
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")


def _streamer(tokenizer: Any) -> Any:
    """A streamer that counts."""
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def __init__(self) -> None:
            super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
            self.prompt, self.times = 0, [time.monotonic()]

        def put(self, value: Any) -> None:
            if self.next_tokens_are_prompt:
                self.prompt = value.numel()
            else:
                self.times.append(time.monotonic())
            super().put(value)

        def figures(self) -> str:
            first, made = self.times[1] - self.times[0], len(self.times) - 1
            after = self.times[-1] - self.times[1]
            rate = f", then {(made - 1) / after:.2f} tokens/s" if after > 0 else ""
            return f"{self.prompt} tokens in, {made} out: the first after {first:.2f} s{rate}"

    return Streamer()


@contextmanager
def service_of(model: str, overrides: list[str]) -> Iterator[str]:
    """Runs `epserve serve MODEL` on a free port, and yields its address. The service ends with the block or this process.

    Raises NotReady with the last lines of its log when it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="epserve-generate-") as folder, _signals_end():
        ready, log = Path(folder) / "ready.json", Path(folder) / "service.log"
        command = [sys.executable, "-m", "epserve", "serve", model, "--ready-file", str(ready)]
        command += [f"--set={each}" for each in ("server.port=0", *overrides)]
        print(f"starting a service of {model} on this machine; its log is {log}", file=sys.stderr)
        began, libc = time.monotonic(), ctypes.CDLL(None)

        def bound() -> None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # it ends with us, however we end

        with log.open("wb") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=bound
            )
        try:
            while not ready.exists():
                if process.poll() is not None:
                    last = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:])
                    raise NotReady(f"the service of {model} ended with code {process.returncode}:\n{last}")
                time.sleep(0.05)
            facts = json.loads(ready.read_text(encoding="utf-8"))
            print(f"it serves after {time.monotonic() - began:.1f} s", file=sys.stderr)
            yield f"{facts['host']}:{facts['port']}"
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def _signals_end() -> Iterator[None]:
    """SIGTERM raises SystemExit, so that the service is ended too."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
