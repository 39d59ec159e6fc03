import torch

from prefect_rlhf.rlhf_tasks.system.rank_process import peak_bytes, process_bytes, reset_peak

CPU = torch.device("cpu")
SIZE = 256 * 2**20


def test_the_peak_remembers_what_is_gone_until_it_is_reset():
    reset_peak(CPU)
    before = peak_bytes(CPU)
    held = torch.ones(SIZE, dtype=torch.uint8)
    assert process_bytes(CPU) > before + 0.8 * SIZE
    del held
    assert process_bytes(CPU) < before + 0.5 * SIZE
    assert peak_bytes(CPU) > before + 0.8 * SIZE
    reset_peak(CPU)
    assert peak_bytes(CPU) < before + 0.5 * SIZE
