"""Every transformers family with an experts module, and the page that says what came out: docs/coverage.md."""

import pytest
import transformers

from tests.models.coverage_families import CASES, families
from tests.models.coverage_table import LAYOUTS, PAGE, TOLERANCE, evaluate_all, page

LEAST = 60  # families at layer parity, and generating the same tokens
# Families that are known not to get there, and the words of the reason. A new one is a regression or needs a line here.
KNOWN = {"openai_privacy_filter": "classifies tokens"}


@pytest.fixture(scope="module")
def rows():
    return {row.family: row for row in evaluate_all(families())}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_families_reach_parity_and_the_page_says_so(rows):
    PAGE.write_text(page(list(rows.values())))
    for what in ("loads", "layer", "generate"):
        reached = [name for name, row in rows.items() if getattr(row, what)]
        assert len(reached) >= LEAST, what
    for number, layout in enumerate(LAYOUTS):
        assert all(row.stored[number] != "no" for row in rows.values()), layout


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", families())
def test_family(rows, family):
    row = rows[family]
    if family in KNOWN:
        assert not row.generate and KNOWN[family] in row.reason
    else:
        assert row.generate and row.stored and "no" not in row.stored, (row.reason, row.stored)
    assert row.generate or row.reason, "a no comes with its reason"
    assert not row.layer or row.error <= TOLERANCE


def test_the_table_is_of_the_installed_transformers():
    found = families()
    assert len(found) >= LEAST, transformers.__version__
    assert not set(CASES) - set(found), "cases of families that have no experts module"
