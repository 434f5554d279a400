"""What the solved labs build drives the engine: the parts of each lab alone, and those of all labs together."""

import pytest

from kvlab.lab.beside import run_beside_ours
from kvlab.lab.source import read_sources
from kvlab.lab.yours import parts_from_notebook
from kvlab.parts import Parts, survive

OF_LAB = {  # lab -> the parts that it must give
    "01": {"sizing"},
    "02": {"arena"},
    "03": {"free_queue", "block_pool"},
    "04": {"fork", "ensure_writable"},
    "05": {"prefix_index"},
    "06": {"prefix_index"},
    "07": {"admit"},
    "08": {"plan_tokens"},
    "09": {"choose_victim", "swap_or_recompute", "may_resume"},
    "10": {"attention"},
    "11": {"attention"},
    "12": {"rms_norm", "rope", "attend", "flat_batch"},
    "14": {"detokenizer", "stop_checker"},
}


@pytest.fixture(scope="module")
def parts_of(tmp_path_factory):
    """Lab -> its parts, read from its solved notebook as from a student's."""
    folder, found = tmp_path_factory.mktemp("solved"), {}
    for source in read_sources():
        path = folder / source.file_name("en")
        path.write_text(source.notebook("en", solved=True).text(), encoding="utf-8")
        found[source.number], told = parts_from_notebook(path)
        assert all(one.is_yours for one in told), told
    return found


def test_each_lab_gives_its_parts(parts_of):
    assert {lab: set(parts.replaced) for lab, parts in parts_of.items() if parts.replaced} == OF_LAB


@pytest.mark.parametrize("lab", OF_LAB)
def test_a_lab_alone_survives_the_smallest_configurations(parts_of, lab):
    outcomes = survive(parts_of[lab])
    assert outcomes and [outcome for outcome in outcomes if not outcome.survived] == []


@pytest.mark.parametrize("last", ["05", "06"])  # both give a prefix index: the later one is used
def test_all_labs_together_survive(parts_of, last):
    together = Parts()
    for lab in [*(lab for lab in sorted(OF_LAB) if lab != last), last]:
        together |= parts_of[lab]
    assert set(together.replaced) == set().union(*OF_LAB.values())
    outcomes = survive(together)
    assert [outcome for outcome in outcomes if not outcome.survived] == []


@pytest.mark.parametrize("stand_in", [True, False])
def test_the_engine_runs_on_all_of_them_with_our_tokens(parts_of, stand_in):
    if not stand_in:
        pytest.importorskip("torch")
    together = Parts()
    for lab in OF_LAB:
        if lab != "02":  # an arena replaces paging; below
            together |= parts_of[lab]
    result = run_beside_ours(together, stand_in=stand_in, num_gpu_blocks_override=40)
    assert result.same_tokens, result.yours.error
    options = {"reservation": "contiguous", "enable_prefix_caching": False}
    contiguous = run_beside_ours(parts_of["02"], stand_in=stand_in, **options)
    assert contiguous.same_tokens, contiguous.yours.error
