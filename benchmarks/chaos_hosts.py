"""Cuts cables under load: hosts of this machine in network namespaces, ranks over all of them, every answer compared.

    python -m benchmarks.chaos_hosts --cuts 20 --out benchmarks/results/chaos_hosts.json

There are three hosts (tests/hosts), with two ranks and a spare, one each. The engine and its clients are on the first. `cut`:
the cable of another host is out until the others serve again, then the host rejoins. `blip`: it is out for less than a
heartbeat. The program needs root and network namespaces, and ends with 77 and a message without them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from benchmarks import reports
from epserve.config import parse_config
from epserve.engine.engine import Batch, Engine
from epserve.errors import EpserveError
from epserve.models.demo import reference_block, write_demo_checkpoint
from tests.hosts import Hosts, fake_hosts, why_not

LAYER, PORT, HOSTS = 1, 6379, 3
SKIPPED = 77  # what automake's tests end with when they cannot run
HANG_S = 240.0
RAY = str(Path(sys.executable).parent / "ray")
QUICK_HEALTH = {  # Ray itself needs 65 s by default until it calls a node dead
    "RAY_health_check_initial_delay_ms": "1000", "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000", "RAY_health_check_failure_threshold": "3",
}  # fmt: skip
ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", **QUICK_HEALTH}


async def serve(path: str, heartbeat: float) -> None:
    """Runs the engine and its clients on the first host. It prints a line of JSON every 50 ms, and ends when its input does."""
    config = {
        "model": {"path": path},
        "engine": {"ranks": HOSTS - 1, "device": "cpu", "experts": "grouped_mm", "spares": 1, "spare_weights": "host"},
        "cluster": {"address": f"10.88.0.10:{PORT}", "placement": "STRICT_SPREAD", "start_timeout_s": HANG_S},
        "scheduler": {"heartbeat_s": heartbeat, "step_timeout_s": 30},
    }
    engine = Engine(parse_config(config))
    reference = reference_block(path, LAYER)
    told = {"answers": 0, "wrong": 0, "errors": []}
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    threading.Thread(target=lambda: (sys.stdin.read(), loop.call_soon_threadsafe(stop.set)), daemon=True).start()

    async def client(number: int) -> None:
        x = torch.randn((1 + 20 * number, 64), generator=torch.Generator().manual_seed(number))
        expected = reference(x)
        while not stop.is_set():
            try:
                y = await engine.forward(Batch(layer=LAYER, hidden=x, deadline=time.monotonic() + HANG_S))
            except EpserveError as error:
                told["errors"].append(f"{type(error).__name__}: {error}")
                continue
            told["answers"] += 1
            told["wrong"] += not torch.allclose(y, expected, rtol=1e-4, atol=1e-5)

    await engine.start()
    clients = [asyncio.ensure_future(client(number)) for number in range(3)]
    while not stop.is_set():
        status = engine.status()
        done = [{"by": each.by, "seconds": round(each.seconds, 3)} for each in engine._pool.recoveries]
        print(json.dumps({
            **told, "state": status.state, "spares": status.spares, "nodes": [rank.node for rank in status.ranks],
            "recoveries": done, "at": time.monotonic(),
        }), flush=True)  # fmt: skip
        await asyncio.sleep(0.05)
    await asyncio.wait_for(asyncio.gather(*clients), HANG_S)
    await engine.close()


class Service:
    """The process on the first host, as the controller outside sees it: `now` is the last line that it printed."""

    def __init__(self, hosts: Hosts, path: Path, heartbeat: float):
        words = [sys.executable, "-m", "benchmarks.chaos_hosts", "--serve", str(path), "--heartbeat", str(heartbeat)]
        self.process = subprocess.Popen(
            [*entering(hosts, 0), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **ENVIRONMENT},
        )  # fmt: skip
        self.now: dict = {}
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            if line.startswith('{"answers"'):
                self.now = json.loads(line)

    def until(self, condition, what: str) -> float:
        end = time.monotonic() + HANG_S
        while not (self.now and condition(self.now)):
            if time.monotonic() > end or self.process.poll() is not None:
                raise SystemExit(f"{what}: not within {HANG_S:g} s, or the service has ended: {self.now}")
            time.sleep(0.01)
        return time.monotonic()

    def whole(self) -> None:
        self.until(lambda now: now["state"] == "serving" and now["spares"] == 1, "all ranks and a spare")


def entering(hosts: Hosts, number: int) -> list[str]:
    """Words before a command that then runs on a host, in this directory."""
    pattern = f"sshd -D -e -f {hosts.folder}/host{number}/"
    sshd = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True, check=True).stdout.split()[-1]
    return ["nsenter", "--target", sshd, "--net", "--pid", "--mount", "--uts", f"--wd={os.getcwd()}"]


def join(hosts: Hosts, number: int, *, cpus: int = 4) -> None:
    """Starts Ray on a host, after it ends the rest of Ray that a cut left there. The host's own processes go on."""
    before = entering(hosts, number)
    subprocess.run([*before, "pkill", "-KILL", "-f", "ray"], check=False)
    where = ["--head", f"--port={PORT}"] if number == 0 else [f"--address=10.88.0.10:{PORT}"]
    common = [f"--node-ip-address={hosts.addresses[number]}", f"--num-cpus={cpus}", "--object-store-memory=100000000"]
    words = [RAY, "start", *where, *common, "--include-dashboard=false" if number == 0 else "--disable-usage-stats"]
    done = subprocess.run(
        [*before, *words], env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=HANG_S
    )
    if done.returncode:
        raise SystemExit(f"ray start on host {number}: {done.stdout[-2000:]}{done.stderr[-2000:]}")


def fault(hosts: Hosts, service: Service, kind: str, holds: str, chance: random.Random, heartbeat: float) -> dict:
    """holds: what the host does whose cable is cut: "rank" or "spare"."""
    service.whole()
    time.sleep(chance.uniform(0.2, 1.0))
    before = service.now
    ranks = [number for number in range(1, HOSTS) if hosts.addresses[number] in before["nodes"]]
    others = [number for number in range(1, HOSTS) if number not in ranks]
    number = chance.choice((ranks if holds == "rank" else others) or ranks or others)
    holds = "rank" if number in ranks else "spare"
    start = time.monotonic()
    hosts.cable(number, plugged=False)
    if kind == "blip":
        time.sleep(chance.uniform(0.1, 0.4) * heartbeat)
        hosts.cable(number, plugged=True)
        answers = service.now["answers"]
        answered = service.until(lambda now: now["answers"] > answers + 3, "answers after a blip")
    elif holds == "rank":
        replaced = len(before["recoveries"])
        service.until(lambda now: len(now["recoveries"]) > replaced and now["state"] == "serving", "recovery")
        answers = service.now["answers"]
        answered = service.until(lambda now: now["answers"] > answers, "answers after a cut")
    else:
        answers = service.now["answers"]
        answered = service.until(lambda now: now["answers"] > answers + 3, "answers without the spare's host")
        service.until(lambda now: now["spares"] == 0, "noticing that the spare is gone")
    if kind == "cut":
        hosts.cable(number, plugged=True)
        join(hosts, number)
    service.whole()
    new = service.now["recoveries"][len(before["recoveries"]) :]
    return {
        "kind": kind, "host_of": holds, "answered_s": round(answered - start, 2), "by": [each["by"] for each in new],
        "rebuild_s": [each["seconds"] for each in new], "whole_s": round(time.monotonic() - start, 1),
        "load": round(os.getloadavg()[0], 1),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, default=20)
    parser.add_argument("--heartbeat", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(args.serve, args.heartbeat))
        return 0
    if reason := why_not():
        print(f"cannot cut cables here: {reason}", file=sys.stderr)
        return SKIPPED
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the hosts go in any case
    chance = random.Random(args.seed)
    faults: list[dict] = []
    with tempfile.TemporaryDirectory() as folder, fake_hosts(HOSTS, Path(folder) / "hosts") as hosts:
        path = Path(folder) / "model"
        write_demo_checkpoint("deepseek_v3", path, dtype=torch.float32)
        for number in range(HOSTS):
            join(hosts, number)
        service = Service(hosts, path, args.heartbeat)
        for number in range(args.cuts):
            kind = "cut" if number % 2 == 0 else "blip"
            holds = "spare" if number % 6 >= 4 else "rank"
            faults.append(fault(hosts, service, kind, holds, chance, args.heartbeat))
            print(json.dumps(faults[-1]), flush=True)
        last = service.now
        assert service.process.stdin is not None
        service.process.stdin.close()
        service.process.wait(HANG_S)
    result = {
        "heartbeat_s": args.heartbeat, "cpus": os.cpu_count(), "faults": len(faults), "answers": last["answers"],
        "wrong": last["wrong"], "errors": last["errors"], "each": faults,
        "answered_s": {
            kind: {"p50": sorted(times)[len(times) // 2], "max": max(times)}
            for kind in ("cut", "blip")
            if (times := [each["answered_s"] for each in faults if each["kind"] == kind])
        },
    }  # fmt: skip
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        reports.save(args.out, result)
    print(json.dumps({key: value for key, value in result.items() if key != "each"}, indent=1))
    return 1 if result["wrong"] or result["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
