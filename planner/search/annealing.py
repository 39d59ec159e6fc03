"""Simulated annealing over choices of options, compiled (Kirkpatrick, Gelatt, Vecchi 1983).

A round ends with a descent from its best state, if that fits memory: each call in turn gets its best option, until
no call has a better one.

The energy limit for accepting a proposal is drawn before the proposal is priced. So most proposals are rejected by a
cheap lower bound that needs only seconds and meshes: the longest model cycle and the busiest device.
"""

# pyright: reportArgumentType=false, reportReturnType=false
# (compiled code takes elements of arrays for the numbers they are)

from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

from prefect_rlhf.planner.search.bounds.cycles import Cycles
from prefect_rlhf.planner.search.compiled.arrays import Arrays
from prefect_rlhf.planner.search.compiled.compile import Floats, Ints, compiled, inner
from prefect_rlhf.planner.search.compiled.evaluator import value
from prefect_rlhf.planner.search.compiled.tables import Tables
from prefect_rlhf.rlhf_tasks.system.counter_random import stream, stream_key

STEPS = (5_000, 5_000, 10_000, 10_000, 20_000)
"""Proposals of each round; the last number holds for all later rounds. Short first rounds find plans early."""
ROUNDS = 24  # at most
AGREE = 3  # annealing stops when this many rounds have found the best plan
SAME = 1e-9  # relative; plans whose times differ by less count as one
HOT, COLD = 0.04, 0.0005  # temperatures at a round's beginning and end, as shares of the start's time
CALM = 0.004  # HOT for a round that polishes a plan
PAIRS = 0.4  # share of the proposals that change two calls
CHUNK = 500  # proposals of one part of a round; the clock is read between parts
ALIKE = 0.3  # probability that a proposal on another call's mesh takes that call's strategy too
OWN, PEERS, BESIDE, ENDS = 0.25, 0.4, 0.55, 0.75
"""Cumulative probabilities of where a proposal's mesh lies: the call's own mesh, another call's, beside that, on a
mesh that shares an end with its own; else anywhere."""

ACCEPTED, PAIRED, FIRST, SECOND, DRAWS = 0, 1, 2, 8, 14
"""Places of a proposal's random numbers, one for each decision: whether it is accepted, whether it changes two calls,
then those of the first call and of the second."""
CALL, WHERE, MESH, PEER, LIKE, OPTION = range(6)
"""Places of a call's random numbers: which call, where its mesh lies (`OWN` to `ENDS`), which mesh, which other call,
whether it takes that call's strategy (`ALIKE`), which option."""
SHORT_OF_MEMORY = (
    0.3  # if memory lacks, energy grows by this share of the time plus twice the share that lacks
)

METROPOLIS_STEPS = 5_000  # proposals of a round
METROPOLIS_TEMPERATURE = 0.01  # as a share of the best time so far


class Neighbours(NamedTuple):
    """The options of each call by mesh, for proposals. All arrays are int64.

    start        [calls + 1] call c has the meshes start[c] .. start[c + 1] - 1 of the arrays over meshes
    first, size  [meshes] first device and number of devices
    begin        [meshes + 1] the options of mesh m are by_speed[begin[m]] .. by_speed[begin[m + 1] - 1]
    by_speed     [options] option numbers within their call, fastest first for each mesh
    """

    start: Ints
    first: Ints
    size: Ints
    begin: Ints
    by_speed: Ints


class PricedChoice(NamedTuple):
    """A choice ([calls] int64 option numbers), its seconds per iteration, and the bytes of memory that it lacks."""

    choice: Ints
    time_s: float
    excess_bytes: float


def neighbours(tables: Tables, barred: tuple[int, int, int] | None = None) -> Neighbours:
    """The options of each call by mesh, fastest first.

    barred  (call, first device, size): a mesh that is not allowed for this call
    """
    start, first, size, begin, by_speed = [0], [], [], [0], []
    for call, options in enumerate(tables.options):
        meshes: dict[tuple[int, int], list[int]] = {}
        for number, option in enumerate(options):
            meshes.setdefault((option.first, option.size), []).append(number)
        for (a, n), numbers in sorted(meshes.items()):
            if (call, a, n) == barred:
                continue
            first.append(a)
            size.append(n)
            by_speed += sorted(numbers, key=lambda number: options[number].seconds)
            begin.append(len(by_speed))
        start.append(len(first))
    return Neighbours(*(np.array(column, np.int64) for column in (start, first, size, begin, by_speed)))


def nobody(tables: Tables) -> Neighbours:
    """Neighbours without any option."""
    none = np.zeros(0, np.int64)
    return Neighbours(np.zeros(len(tables.calls) + 1, np.int64), none, none, np.zeros(1, np.int64), none)


def uniforms(seed: int, purpose: str, round_number: int, steps: int) -> Floats:
    """[steps, DRAWS] random numbers in [0, 1), a pure function of the arguments."""
    with np.errstate(over="ignore"):
        bits = stream(stream_key(seed, purpose, round_number), np.arange(steps * DRAWS, dtype=np.int64))
    return ((bits >> 11) & ((1 << 53) - 1)).reshape(steps, DRAWS) / float(1 << 53)


def start_state(tables: Tables, choice: Sequence[int]) -> PricedChoice:
    """A choice with its price."""
    found = tables.evaluate(choice)
    return PricedChoice(np.asarray(choice, np.int64), found.time_s, found.excess_bytes)


def annealing(
    tables: Tables,
    near: Neighbours,
    cycles: Cycles,
    starts: Sequence[Sequence[int]],
    seed: int,
    purpose: str = "annealing",
) -> Iterator[tuple[PricedChoice, int]]:
    """Yields after each part of a round: (best state so far, number of choices that the part priced).

    starts   initial choices, which the rounds take in turn. A round decides early how large the meshes are, so
             rounds from different starts find more than rounds that continue from the best state
    purpose  name of the stream of random numbers
    """
    best, agreeing = start_state(tables, starts[0]), 0
    for number in range(ROUNDS):
        start = met = start_state(tables, starts[number % len(starts)])
        draws = uniforms(seed, purpose, number, STEPS[min(number, len(STEPS) - 1)])
        for found, n_priced in _parts(tables, near, cycles, start, draws, HOT):
            met = found
            yield better(best, met), n_priced
        agreeing = 0 if _beats(met, best) else agreeing
        best = better(best, met)
        agreeing += not _beats(best, met)
        if agreeing == AGREE:
            return


def _beats(a: PricedChoice, b: PricedChoice) -> bool:
    """Whether a state is better than another by more than rounding."""
    return (a.excess_bytes, a.time_s * (1 + SAME)) < (b.excess_bytes, b.time_s)


def polishing(
    tables: Tables, near: Neighbours, cycles: Cycles, state: PricedChoice, seed: int, number: int
) -> Iterator[tuple[PricedChoice, int]]:
    """One calm round from a state. Yields after each part: (best state so far, number of choices that it priced).

    number  index of the polishing; selects its random numbers
    """
    draws = uniforms(seed, "polishing", number, STEPS[0])
    yield from _parts(tables, near, cycles, state, draws, CALM)


def _parts(
    tables: Tables, near: Neighbours, cycles: Cycles, start: PricedChoice, draws: Floats, hot: float
) -> Iterator[tuple[PricedChoice, int]]:
    """One round. Yields after each CHUNK of proposals and each call of the descent: (best state so far, number of
    choices priced since the last yield).

    draws  [steps, DRAWS] random numbers; steps is a multiple of CHUNK
    hot    temperature at the beginning, as a share of the start's time
    """
    best = state = start
    heat = start.time_s * hot * (COLD / hot) ** (np.arange(len(draws) + 1) / len(draws))
    for step in range(0, len(draws), CHUNK):
        part = draws[step : step + CHUNK]
        found, state, n_priced = anneal(
            tables.arrays, near, cycles, state, part, heat[step], heat[step + CHUNK], True
        )
        best = better(best, found)
        yield best, n_priced
    call = unchanged = 0
    while best.excess_bytes <= 0 and unchanged < len(tables.calls):
        found, n_priced = descend(tables.arrays, near, cycles, best, call)
        unchanged = 0 if _beats(found, best) else unchanged + 1
        best, call = better(best, found), (call + 1) % len(tables.calls)
        yield best, n_priced


def better(a: PricedChoice, b: PricedChoice) -> PricedChoice:
    """The state that lacks fewer bytes of memory; if equal, the faster one; if equal too, a."""
    return b if (b.excess_bytes, b.time_s) < (a.excess_bytes, a.time_s) else a


def greedy_choice(tables: Tables) -> list[int]:
    """The fastest option of every call by itself."""
    return [min(range(len(found)), key=lambda n, found=found: found[n].seconds) for found in tables.options]


def metropolis(
    tables: Tables, near: Neighbours, cycles: Cycles, seed: int
) -> Iterator[tuple[PricedChoice, int]]:
    """A baseline from earlier work: Metropolis search over choices (ReaL, arXiv:2406.14088, section 5.2).

    It starts with the fastest option of each call. A proposal gives one call any of its options with equal
    probability, and is accepted with probability min(1, exp(-(change of time) / temperature)). Yields forever, after
    each part of a round: (best state so far, number of choices that the part priced).
    """
    best = state = start_state(tables, greedy_choice(tables))
    for number in count():
        heat = METROPOLIS_TEMPERATURE * best.time_s
        draws = uniforms(seed, "mcmc", number, METROPOLIS_STEPS)
        for step in range(0, METROPOLIS_STEPS, CHUNK):
            part = draws[step : step + CHUNK]
            found, state, n_priced = anneal(tables.arrays, near, cycles, state, part, heat, heat, False)
            best = better(best, found)
            yield best, n_priced


@compiled
def anneal(
    arrays: Arrays,
    near: Neighbours,
    cycles: Cycles,
    start: PricedChoice,
    draws: Floats,
    hot: float,
    cold: float,
    local: bool,
) -> tuple[PricedChoice, PricedChoice, int]:
    """Proposals from a start. Each changes one call, or sometimes two if `local`.

    draws      [steps, DRAWS] random numbers
    hot, cold  temperatures of the first and last step, in seconds; geometric in between
    local      whether proposals prefer meshes related to those in use (annealing), or all options alike (MCMC)
    Returns (best state met, last state, number of choices priced). The best state fits memory if any state did.
    """
    state = best = start
    n_priced = 0
    for step in range(len(draws)):
        u, first, second = draws[step], draws[step, FIRST:SECOND], draws[step, SECOND:DRAWS]
        call = int(first[CALL] * arrays.n_calls)
        choice = state.choice.copy()
        choice[call] = _propose(arrays, near, choice, call, first, local)
        if local and u[PAIRED] < PAIRS:
            call = int(second[CALL] * arrays.n_calls)
            choice[call] = _propose(arrays, near, choice, call, second, local)
        if np.array_equal(choice, state.choice):
            continue
        temperature = hot * (cold / hot) ** (step / len(draws))
        limit = _energy(arrays, state) - temperature * np.log(1 - u[ACCEPTED])
        if _surely_above(arrays, cycles, choice, limit):
            continue
        time_s, excess_bytes, _ = value(arrays, choice, limit)
        n_priced += 1
        proposed = PricedChoice(choice, time_s, excess_bytes)
        if _energy(arrays, proposed) > limit:
            continue
        state = proposed
        if (excess_bytes, time_s) < (best.excess_bytes, best.time_s):
            best = state
    return best, state, n_priced


@compiled
def descend(
    arrays: Arrays, near: Neighbours, cycles: Cycles, start: PricedChoice, call: int
) -> tuple[PricedChoice, int]:
    """The best state that fits memory and differs from `start` at most in one call's option, and the number of
    choices priced. `start` must fit memory."""
    best, n_priced = start, 0
    for i in range(near.begin[near.start[call]], near.begin[near.start[call + 1]]):
        if near.by_speed[i] == start.choice[call]:
            continue
        choice = start.choice.copy()
        choice[call] = near.by_speed[i]
        if _surely_above(arrays, cycles, choice, best.time_s):
            continue
        time_s, excess_bytes, _ = value(arrays, choice, best.time_s)
        n_priced += 1
        if excess_bytes <= 0 and time_s < best.time_s:
            best = PricedChoice(choice, time_s, excess_bytes)
    return best, n_priced


@inner
def _energy(arrays: Arrays, state: PricedChoice) -> float:
    """Seconds per iteration, with a penalty if memory lacks."""
    if state.excess_bytes <= 0:
        return state.time_s
    return state.time_s * (1 + SHORT_OF_MEMORY + 2 * state.excess_bytes / arrays.memory_bytes)


@inner
def _surely_above(arrays: Arrays, cycles: Cycles, choice: Ints, limit: float) -> bool:
    """Whether a model cycle or the load of a device alone exceeds a limit in seconds.

    The busiest device is the first one of some mesh, so only these are checked.
    """
    o, n = arrays.options, arrays.n_calls
    for k in range(len(cycles.delays)):
        total = 0.0
        for c in range(n):
            if cycles.members[k, c]:
                total += cycles.members[k, c] * o[arrays.start[c] + choice[c]].seconds
        if total > limit * cycles.delays[k]:
            return True
    for point in range(n):
        device, load = o[arrays.start[point] + choice[point]].first, 0.0
        for c in range(n):
            row = arrays.start[c] + choice[c]
            if o[row].first <= device < o[row].first + o[row].size:
                load += o[row].seconds
        if load > limit:
            return True
    return False


@inner
def _propose(arrays: Arrays, near: Neighbours, choice: Ints, call: int, u: Floats, local: bool) -> int:
    """Another option for a call: on its own mesh, on another call's, beside that, on a mesh that shares an end with
    its own, or anywhere.

    u  random numbers of the call (`CALL` to `OPTION`). Squaring the last one prefers fast options of a mesh.
    """
    o = arrays.options
    if not local:
        return int(u[OPTION] * (arrays.start[call + 1] - arrays.start[call]))
    low, high = near.start[call], near.start[call + 1]
    mesh = low + int(u[MESH] * (high - low))
    peer = int(u[PEER] * arrays.n_calls)
    if u[WHERE] < ENDS:
        mine, other = arrays.start[call] + choice[call], arrays.start[peer] + choice[peer]
        mesh = _mesh_like(
            near,
            low,
            high,
            mesh,
            u[WHERE],
            (o[mine].first, o[mine].first + o[mine].size),
            (o[other].first, o[other].first + o[other].size),
        )
    options, other = near.begin[mesh + 1] - near.begin[mesh], arrays.start[peer] + choice[peer]
    if u[LIKE] < ALIKE and o[other].first == near.first[mesh] and o[other].size == near.size[mesh]:
        for i in range(near.begin[mesh], near.begin[mesh + 1]):
            if o[arrays.start[call] + near.by_speed[i]].strategy == o[other].strategy:
                return near.by_speed[i]
    return near.by_speed[near.begin[mesh] + int(u[OPTION] * u[OPTION] * options)]


@inner
def _mesh_like(
    near: Neighbours,
    low: int,
    high: int,
    begin: int,
    where: float,
    mine: tuple[int, int],
    other: tuple[int, int],
) -> int:
    """The first mesh from `begin` on, cyclically, with the wanted relation to a call's own mesh or to another's.

    low, high    the call's meshes are low .. high - 1
    where        a random number that selects the relation
    mine, other  (first device, device after the last)
    Returns `begin` if there is no such mesh.
    """
    for i in range(high - low):
        mesh = low + (begin - low + i) % (high - low)
        first, end = near.first[mesh], near.first[mesh] + near.size[mesh]
        if where < OWN:
            wanted = first == mine[0] and end == mine[1]
        elif where < PEERS:
            wanted = first == other[0] and end == other[1]
        elif where < BESIDE:
            wanted = first == other[1] or end == other[0]
        else:
            wanted = first == mine[0] or end == mine[1]
        if wanted:
            return mesh
    return begin
