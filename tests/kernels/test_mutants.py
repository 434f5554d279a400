"""The tests tested: each fault of mutants.py, put into a kernel, must be noticed.

(That the words a fault replaces are still in the source is checked when it is loaded.)
"""

import numpy as np
import pytest
from mutants import CASES, EQUIVALENT, FAULTS, killed_by, load

from kvlab_kernels import launch

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="a fault could bring down the GPU's context")


@pytest.mark.parametrize("case", CASES)
def test_a_case_passes_without_a_fault(case, tmp_path):
    CASES[case](lambda name: load(name, "", "", tmp_path))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault, tmp_path):
    with np.errstate(all="ignore"):  # faults make infinities, of which NumPy warns
        assert killed_by(FAULTS[fault], tmp_path), f"nobody noticed: {fault}"


@pytest.mark.parametrize("fault", EQUIVALENT)
def test_a_fault_that_no_result_can_show(fault, tmp_path):
    """If one is noticed after all, it belongs to the others, and the reason here was wrong."""
    fault, _ = EQUIVALENT[fault]
    assert killed_by(fault, tmp_path) is None
