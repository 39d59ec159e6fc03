"""A job whose generation has ended leaves its loop at the next step; other threads and later jobs do not."""

import threading
from types import SimpleNamespace

import pytest

from prefect_rlhf.rlhf_tasks.parallel.generate import generation
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine
from prefect_rlhf.rlhf_tasks.system.interruption import JobEnded, interruptible, leave_if_ended


def test_only_the_job_that_has_ended_is_left():
    ended = threading.Event()
    leave_if_ended()
    with interruptible(ended):
        leave_if_ended()
        ended.set()
        with pytest.raises(JobEnded):
            leave_if_ended()
        other = threading.Thread(target=leave_if_ended)
        other.start()
        other.join()
        with interruptible(threading.Event()):
            leave_if_ended()
    leave_if_ended()


def test_a_decode_loop_is_left_at_its_next_step():
    ended, steps = threading.Event(), []

    def compute(wait_s: float):
        steps.append(len(steps))
        if len(steps) == 3:
            ended.set()

    endless = SimpleNamespace(done=False, computed=False, runs=True, compute=compute)
    with interruptible(ended), pytest.raises(JobEnded):
        generation._decode([endless])
    assert len(steps) == 3


def test_a_pass_over_a_micro_batch_does_not_begin():
    ended = threading.Event()
    ended.set()
    with interruptible(ended), pytest.raises(JobEnded):
        Engine._stage_output(SimpleNamespace(), None, None, None)
