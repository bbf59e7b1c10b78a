"""What ranks tell each other in set-up is data: JSON in tensors of the group."""

import json
import pickle
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from epserve.errors import RankFailed
from epserve.modular_kernel import RankContext, gathering
from epserve.modular_kernel.gathering import gather
from tests.support.ranks import run_ranks

ROOT = Path(__file__).resolve().parent.parent.parent
RAN = "a rank ran code of another one"


def everything(ranks: RankContext) -> list:
    of_rank = {"rank": ranks.rank, "text": "x" * 1000 * ranks.rank, "none": None, "times": {4: 1e-6}}
    return [gather(ranks, of_rank), gather(ranks, None), gather(ranks, ("host", "\0name"))]


def test_every_rank_gets_the_values_of_all_in_rank_order():
    values = [{"rank": rank, "text": "x" * 1000 * rank, "none": None, "times": {"4": 1e-6}} for rank in range(3)]
    expected = [values, [None] * 3, [["host", "\0name"]] * 3]
    assert run_ranks(everything, 3) == [expected] * 3


class Bomb:
    def __reduce__(self):
        return print, (RAN,)


def beside_a_liar(ranks: RankContext) -> str:
    """Rank 1 sends what `all_gather_object` of torch would unpickle, in the tensors of `gather`."""
    lie = pickle.dumps(Bomb()).decode("latin-1") if ranks.rank == 1 else json.dumps(1)
    with mock.patch.object(gathering.json, "dumps", return_value=lie):
        try:
            gather(ranks, 1)
        except RankFailed as error:
            return str(error)
    return ""


def test_a_pickle_of_another_rank_is_no_json_and_is_not_run(capfd):
    first, _ = run_ranks(beside_a_liar, 2)
    assert "a value that is no JSON" in first
    assert RAN not in capfd.readouterr().out


def beside_a_boaster(ranks: RankContext) -> str:
    if ranks.rank == 1:
        dist.all_gather(
            [torch.empty(1, dtype=torch.int64) for _ in range(2)], torch.tensor([1 << 50]), group=ranks.group
        )
        return ""
    with pytest.raises(RankFailed, match=re.escape(f"{1 << 50}")):
        gather(ranks, 1)
    return ""


def test_a_length_that_cannot_be_is_refused_before_anything_is_allocated():
    run_ranks(beside_a_boaster, 2)


@pytest.mark.parametrize("folder", ["epserve", "all2all", "experts"])
def test_no_module_of_ours_unpickles(folder):
    calls = re.compile(r"(all_gather|broadcast|gather|scatter|send|recv)_object|\bpickle\b|torch\.load\(|cloudpickle")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in (ROOT / folder).rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if calls.search(line) and "nothing" not in line and "no pickle" not in line.lower()
    ]
    assert found == []
