"""Complex tensors between stages, and complex weights, train as in one piece."""

from __future__ import annotations

import pytest
import torch

import complex_workers as workers
from penstock.runtime import run_threads, spawn

pytestmark = [
    pytest.mark.numerics,
    pytest.mark.filterwarnings("ignore:this split backward computes"),
]


def assert_same_as_in_one_piece(results) -> None:
    expected = workers.in_one_piece()
    seen = set()
    for held in results:
        for name, gradient in held.items():
            assert gradient is not None, name
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-12)
            seen.add(name)
    assert seen == set(expected)


@pytest.mark.parametrize(
    ("name", "microbatches", "recompute"),
    [("1f1b", 2, False), ("1f1b", 2, True), ("zb-v", 2, False), ("chimera", 4, False)],
)
def test_complex_tensors_between_threads_get_their_gradients(
    name, microbatches, recompute
):
    def work(comm):
        return workers.train(comm, name, microbatches, recompute)

    assert_same_as_in_one_piece(run_threads(2, work))


def test_processes_send_complex_tensors_and_sum_complex_gradients():
    """In Chimera both ranks hold all weights, so their gradients are summed."""
    results = spawn(2, workers.train, "chimera", 4, False)
    assert_same_as_in_one_piece(results)
