"""The waiting queue and the running set against a sorted list."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ironbatch.kernels import ending, queues
from ironbatch.kernels.arena import Geometry, StateArena
from ironbatch.kernels.jit import kernel
from ironbatch.kernels.records import STATUS_NONE, STATUS_RUNNING, STATUS_WAITING
from ironbatch.kernels.shared import open_shared
from ironbatch.kernels.state import open_state
from ironbatch.limits import PRIORITY_CLASSES
from ironbatch.shm.segment import Segment
from tests.support import machine_settings, small_config

SEQUENCES = 8


@kernel("int64(intp, int64)")
def enqueue(address, sequence):
    queues.enqueue(open_state(address), sequence)
    return 0


@kernel("int64(intp, int64)")
def dequeue(address, sequence):
    queues.dequeue(open_state(address), sequence)
    return 0


@kernel("int64(intp)")
def first_waiting(address):
    return queues.first_waiting(open_state(address), 0)


@kernel("int64(intp, int64)")
def insert_running(address, sequence):
    queues.insert_running(open_state(address), sequence)
    return 0


@kernel("int64(intp, int64)")
def remove_running(address, sequence):
    queues.remove_running(open_state(address), sequence)
    return 0


@kernel("int64(intp, intp, int64)")
def preempt(address, segment_address, sequence):
    ending.preempt(open_state(address), open_shared(segment_address), sequence, ending.KV_GOOD)
    return 0


class QueueMachine(RuleBasedStateMachine):
    """Eight sequences, each idle, waiting or running; each time it waits anew it may have another seniority."""

    def teardown(self) -> None:
        if hasattr(self, "segment"):
            self.segment.close()

    @initialize()
    def start(self) -> None:
        self.arena = StateArena(Geometry(SEQUENCES, 1, 8, 4, 32, SEQUENCES, 16))
        self.address = self.arena.address
        self.segment = Segment.create(small_config(max_running_seqs=SEQUENCES, max_queued_requests=0), 0)
        self.records = self.arena.views["sequences"]
        self.idle = set(range(SEQUENCES))
        self.waiting: set[int] = set()
        self.running: set[int] = set()
        self.forgotten: list[int] = []
        self.preemptions = [0] * SEQUENCES

    def _seniority(self, sequence: int) -> tuple[int, int, int]:
        arrival_ns = int(self.arena.views["arrival_ns"][sequence])
        return int(self.records[sequence]["priority_class"]), arrival_ns, sequence

    @precondition(lambda self: self.idle)
    @rule(
        data=st.data(),
        priority_class=st.sampled_from([0, 7, PRIORITY_CLASSES - 1]),
        arrival_ns=st.integers(0, 3) | st.sampled_from([2**40, 2**62]),
    )
    def arrive(self, data: st.DataObject, priority_class: int, arrival_ns: int) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.idle)))
        self.records[sequence]["priority_class"] = priority_class
        self.arena.views["arrival_ns"][sequence] = arrival_ns
        enqueue(self.address, sequence)
        self.idle.remove(sequence)
        self.waiting.add(sequence)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.waiting)))
        dequeue(self.address, sequence)
        self.waiting.remove(sequence)
        self.idle.add(sequence)

    @precondition(lambda self: self.waiting)
    @rule()
    def admit(self) -> None:
        sequence = first_waiting(self.address)
        assert sequence == min(self.waiting, key=self._seniority)
        dequeue(self.address, sequence)
        insert_running(self.address, sequence)
        self.waiting.remove(sequence)
        self.running.add(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.running)))
        remove_running(self.address, sequence)
        self.running.remove(sequence)
        self.idle.add(sequence)

    @precondition(lambda self: self.running and len(self.forgotten) < 2 * SEQUENCES)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        victim = data.draw(st.sampled_from(sorted(self.running)))
        self.records[victim]["computed_tokens"] = 5
        self.preemptions[victim] += 1
        preempt(self.address, self.segment.address, victim)
        self.running.remove(victim)
        self.waiting.add(victim)
        self.forgotten.append(victim)
        assert self.records[victim]["computed_tokens"] == 0

    @precondition(lambda self: self.forgotten)
    @rule()
    def forget(self) -> None:
        """The scheduler tells its backend in each step."""
        self.arena.header["forget_count"] = 0
        self.forgotten.clear()

    @invariant()
    def both_are_sorted(self) -> None:
        count = int(self.arena.header["running_count"])
        assert self.arena.views["running"][:count].tolist() == sorted(self.running, key=self._seniority)
        forwards = self._walk("queue_heads", "next")
        assert forwards == sorted(self.waiting, key=self._seniority)
        classes = [[s for s in forwards if self._seniority(s)[0] == rank] for rank in range(PRIORITY_CLASSES)]
        assert self._walk("queue_tails", "previous") == [s for members in classes for s in reversed(members)]
        assert self.arena.header["waiting_count"] == len(self.waiting)
        assert first_waiting(self.address) == min(self.waiting, key=self._seniority, default=queues.END)

    def _walk(self, ends: str, link: str) -> list[int]:
        order = []
        for end in self.arena.views[ends].tolist():
            sequence = end
            while sequence != queues.END:
                order.append(sequence)
                assert len(order) <= SEQUENCES, "the links run in a circle"
                sequence = int(self.records[sequence][link])
        return order

    @invariant()
    def statuses_agree(self) -> None:
        expected = {STATUS_NONE: self.idle, STATUS_WAITING: self.waiting, STATUS_RUNNING: self.running}
        for status, sequences in expected.items():
            assert set((self.records["status"] == status).nonzero()[0].tolist()) == sequences
        assert self.records["preemptions"].tolist() == self.preemptions

    @invariant()
    def backend_is_told(self) -> None:
        count = int(self.arena.header["forget_count"])
        assert self.arena.views["forget"][:count].tolist() == self.forgotten


QueueMachine.TestCase.settings = machine_settings(max_examples=80, stateful_step_count=50)
TestQueues = QueueMachine.TestCase
