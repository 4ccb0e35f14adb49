"""Switches hold where they were set and nowhere else: process, thread, task, block; and a wrong one is an error."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest
import torch

import prequal
from prequal import runtime_state as state
from prequal.errors import UnknownOpError
from prequal.runtime.flags import Flags

KNOWN = ("knn", "knn_gather", "rms_norm")


@pytest.fixture
def told() -> list[object]:
    """What the flags said to the gate ("changed") and to the native module (+1, -1)."""
    return []


@pytest.fixture
def flags(told) -> Flags:
    return Flags(lambda: KNOWN, lambda: told.append("changed"), told.append)


def off(flags: Flags) -> set[str]:
    return {op for op in KNOWN if flags.disabled(op)}


def run_python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environ}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


# ---- the process -----------------------------------------------------------------------------------------------------


def test_disable_and_enable_are_each_others_inverse(flags, told):
    flags.disable("knn", "rms_norm")
    assert off(flags) == {"knn", "rms_norm"}
    flags.disable("knn")
    flags.enable("knn")
    assert off(flags) == {"rms_norm"}
    flags.enable("rms_norm", "knn")
    assert off(flags) == set()
    assert told == ["changed"] * 4


def test_one_op_can_be_enabled_after_all_were_disabled(flags):
    flags.disable("all")
    assert off(flags) == set(KNOWN)
    flags.enable("knn")
    assert off(flags) == {"knn_gather", "rms_norm"}
    flags.enable("all")
    assert off(flags) == set()


def test_a_disabled_op_says_by_what(flags):
    flags.disable("knn")
    assert flags.disabled("knn") == "by prequal.disable() or PREQUAL_DISABLE"
    with flags.reference("knn"):
        assert flags.disabled("knn") == "by prequal.reference() in this scope"
    assert flags.disabled("rms_norm") is None


@pytest.mark.parametrize("function", ["disable", "enable", "reference"])
def test_an_unknown_op_is_an_error_with_near_matches_and_changes_nothing(flags, told, function):
    with pytest.raises(UnknownOpError, match=rf"{function}: expected .*, got 'knn_gatther'; did you mean knn_gather"):
        getattr(flags, function)("knn", "knn_gatther")
    with pytest.raises(UnknownOpError, match=r"got 'xyz'; known: knn, knn_gather, rms_norm"):
        getattr(flags, function)("xyz")
    assert off(flags) == set()
    assert told == []


@pytest.mark.parametrize("function", ["disable", "enable", "reference"])
def test_what_is_no_text_is_an_error(flags, function):
    for wrong in (["knn"], prequal.knn, 3, None):
        with pytest.raises(TypeError, match=rf"{function}: expected names of ops as text, got {type(wrong).__name__}"):
            getattr(flags, function)(wrong)


@pytest.mark.parametrize("function", ["disable", "enable"])
def test_no_name_is_an_error_and_not_all(flags, function):
    with pytest.raises(TypeError, match=rf"{function}: expected the name of an op or 'all', got none"):
        getattr(flags, function)()


def test_strict_takes_a_bool_and_not_the_name_of_an_op(flags):
    with pytest.raises(TypeError, match="strict: expected a bool, got str"):
        flags.strict("knn")


# ---- the environment -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        *(("", set()), (" ", set()), (",", set()), ("knn", {"knn"}), (" knn , rms_norm,", {"knn", "rms_norm"})),
        *(("all", set(KNOWN)), ("knn,all", set(KNOWN))),
    ],
)
def test_the_environment_names_ops_with_commas(flags, text, wanted):
    flags.read({"PREQUAL_DISABLE": text})
    assert off(flags) == wanted


@pytest.mark.parametrize("text", ["1", "true", "YES", " on "])
def test_strict_can_be_set_in_words(flags, text):
    flags.read({"PREQUAL_STRICT": text})
    assert flags.is_strict


@pytest.mark.parametrize("text", ["", "0", "False", "no", "off"])
def test_strict_can_be_unset_in_words(flags, text):
    flags.read({"PREQUAL_STRICT": text})
    assert not flags.is_strict


def test_reading_a_wrong_environment_changes_nothing(flags):
    flags.disable("knn")
    for environ in ({"PREQUAL_DISABLE": "rms_norm,nonsense"}, {"PREQUAL_DISABLE": "all", "PREQUAL_STRICT": "maybe"}):
        with pytest.raises(ValueError, match="expected"):
            flags.read(environ)
        assert off(flags) == {"knn"}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "PREQUAL_DISABLE",
            "rms_nrm",
            "PREQUAL_DISABLE: expected the name of an op or 'all', got 'rms_nrm'; did you mean",
        ),
        ("PREQUAL_DISABLE", "knn,qqqq", "PREQUAL_DISABLE: expected the name of an op or 'all', got 'qqqq'; known: "),
        ("PREQUAL_STRICT", "ja", "PREQUAL_STRICT: expected 1 or 0 (or true, yes, on / false, no, off), got 'ja'"),
        ("PREQUAL_POLICY", "lax", "policy (PREQUAL_POLICY): expected auto, strict, trust, got 'lax'"),
    ],
)
def test_a_wrong_environment_is_an_error_at_import(name, value, message):
    found = run_python("import prequal; print('imported')", **{name: value})
    assert found.returncode != 0
    assert "imported" not in found.stdout
    assert message in found.stderr


def test_the_environment_holds_from_the_first_call_on():
    code = """if True:
        import prequal, torch
        from prequal import runtime_state as state
        assert state.flags.disabled("knn") and not state.flags.disabled("rms_norm")
        try:
            prequal.rms_norm(torch.ones(2, 4))
        except prequal.FallbackError as error:
            print(error.op, error.device, error.reason)
        with prequal.strict(False):
            prequal.rms_norm(torch.ones(2, 4))
        print(state.gate.policy)
    """
    found = run_python(code, PREQUAL_DISABLE="knn", PREQUAL_STRICT="1", PREQUAL_POLICY="trust", CUDA_VISIBLE_DEVICES="")
    assert found.returncode == 0, found.stderr
    assert found.stdout.split("\n")[0].startswith("rms_norm cpu no_")
    assert found.stdout.split("\n")[1] == "trust"


# ---- scopes ----------------------------------------------------------------------------------------------------------


def test_scopes_nest_and_end_with_their_block(flags, told):
    with flags.reference("knn"):
        with flags.reference("rms_norm"):
            assert off(flags) == {"knn", "rms_norm"}
            with flags.reference():
                assert off(flags) == set(KNOWN)
        assert off(flags) == {"knn"}
    assert off(flags) == set()
    assert told == [1, 1, 1, -1, -1, -1]


def test_the_innermost_strict_scope_holds(flags):
    flags.read({"PREQUAL_STRICT": "1"})
    with flags.strict(False):
        assert not flags.is_strict
        with flags.strict():
            assert flags.is_strict
        assert not flags.is_strict
    assert flags.is_strict


def test_an_exception_ends_a_scope_and_goes_on(flags, told):
    with pytest.raises(KeyError), flags.reference("knn"), flags.strict():
        raise KeyError("mine")
    assert off(flags) == set()
    assert not flags.is_strict
    assert told == [1, -1]


def test_enable_does_not_reach_into_a_scope(flags):
    with flags.reference("knn"):
        flags.enable("all")
        assert off(flags) == {"knn"}


def test_a_scope_that_is_made_and_not_entered_is_nothing(flags, told):
    flags.reference("knn")
    flags.strict()
    assert off(flags) == set()
    assert not flags.is_strict
    assert told == []


def test_a_scope_object_serves_one_block(flags, told):
    scope = flags.reference("knn")
    with scope:
        with pytest.raises(RuntimeError, match=r"prequal.reference\(\): expected a new scope for every `with`"):
            scope.__enter__()
        assert off(flags) == {"knn"}
    with pytest.raises(RuntimeError, match="used before"):
        scope.__enter__()
    assert off(flags) == set()
    assert told == [1, -1]


def test_a_decorated_function_is_in_the_scope_at_every_call(flags, told):
    @flags.reference("knn")
    def inside(depth: int) -> set[str]:
        return inside(depth - 1) if depth else off(flags)

    assert [inside(2), inside(0)] == [{"knn"}, {"knn"}]
    assert off(flags) == set()
    assert sum(told) == 0


def test_what_would_run_after_the_scope_cannot_be_decorated(flags):
    async def coroutine():
        pass

    def generator():
        yield

    async def async_generator():
        yield

    for function, kind in ((coroutine, "an async function"), (generator, "a generator"), (async_generator, "an async")):
        for decorator in (flags.reference("knn"), flags.strict()):
            with pytest.raises(TypeError, match=f"expected a plain function, got {kind}"):
                decorator(function)


# ---- threads, tasks, generators --------------------------------------------------------------------------------------


def test_the_scope_of_one_thread_is_not_that_of_another(flags):
    """Both are inside at the same time: a barrier, and no sleep."""
    barrier = threading.Barrier(len(KNOWN))

    def work(op: str) -> tuple[set[str], bool]:
        with flags.reference(op), flags.strict(op == "knn"):
            barrier.wait(30)
            seen = off(flags), flags.is_strict
            barrier.wait(30)
        assert off(flags) == set()
        return seen

    with ThreadPoolExecutor(len(KNOWN)) as pool:
        seen = list(pool.map(work, KNOWN))
    assert seen == [({op}, op == "knn") for op in KNOWN]


def test_the_scope_of_the_main_thread_is_not_inherited_by_a_new_one(flags):
    with flags.reference("knn"), ThreadPoolExecutor(1) as pool:
        # 3.14 may hand a thread its parent's context (thread_inherit_context): then inheriting is what was asked for
        inherits = bool(getattr(sys.flags, "thread_inherit_context", 0))
        assert pool.submit(off, flags).result(30) == ({"knn"} if inherits else set())


def test_concurrent_tasks_have_their_own_scopes(flags, told):
    async def work(op: str, barrier: asyncio.Barrier) -> None:
        assert off(flags) == set()
        with flags.reference(op), flags.strict(op == "knn"):
            for _ in range(3):
                await barrier.wait()
                assert off(flags) == {op}
                assert flags.is_strict == (op == "knn")
        await barrier.wait()
        assert off(flags) == set()

    async def main() -> None:
        barrier = asyncio.Barrier(len(KNOWN))
        await asyncio.gather(*(work(op, barrier) for op in KNOWN))

    asyncio.run(main())
    assert sorted(told) == [-1] * len(KNOWN) + [1] * len(KNOWN)


def test_a_scope_holds_for_what_its_task_awaits_and_sends_to_a_thread(flags):
    async def awaited() -> set[str]:
        await asyncio.sleep(0)
        return off(flags)

    async def main() -> None:
        with flags.reference("knn"):
            assert await awaited() == {"knn"}
            assert await asyncio.to_thread(off, flags) == {"knn"}
        assert await awaited() == set()

    asyncio.run(main())


def test_a_task_that_outlives_the_scope_it_was_started_in_is_out_of_it(flags, told):
    """The native side stops asking when the block ends; what Python answers must end with it."""

    async def main() -> None:
        inside, after = asyncio.Event(), asyncio.Event()

        async def work() -> list[set[str]]:
            seen = [off(flags)]
            inside.set()
            await after.wait()
            return [*seen, off(flags)]

        with flags.reference("knn"), flags.strict():
            task = asyncio.create_task(work())
            await inside.wait()
        assert sum(told) == 0
        after.set()
        assert await task == [{"knn"}, set()]

    asyncio.run(main())


def test_scopes_that_end_in_another_order_than_they_began_leave_each_other_alone(flags, told):
    def steps():
        with flags.reference("knn"):
            yield

    generator = steps()
    next(generator)
    with flags.reference("rms_norm"):
        assert off(flags) == {"knn", "rms_norm"}
        generator.close()
        assert off(flags) == {"rms_norm"}
    assert off(flags) == set()
    assert told == [1, 1, -1, -1]


def test_a_generator_that_is_closed_in_another_context_ends_its_scope(flags, told):
    def steps():
        with flags.reference("knn"), flags.strict():
            yield

    generator = steps()
    copy_context().run(next, generator)
    assert off(flags) == set()
    generator.close()
    assert told == [1, -1]

    generator = steps()
    next(generator)
    assert off(flags) == {"knn"}
    thread = threading.Thread(target=generator.close)
    thread.start()
    thread.join()
    assert off(flags) == set()
    assert not flags.is_strict
    assert sum(told) == 0


def test_an_async_generator_that_is_left_half_way_ends_its_scope(flags, told):
    async def steps():
        with flags.reference("knn"):
            yield off(flags)
            yield off(flags)

    async def main() -> None:
        generator = steps()
        assert await anext(generator) == {"knn"}
        await asyncio.create_task(generator.aclose())  # in a context of its own, as the event loop does at its end
        assert off(flags) == set()

    asyncio.run(main())
    assert told == [1, -1]


def test_flags_hold_under_many_threads(flags, told):
    """Each thread switches its own op; nobody's switch is lost to another's."""
    ops = [f"op{i}" for i in range(8)]
    many = Flags(lambda: ops)

    def work(op: str) -> None:
        for _ in range(200):
            many.disable(op)
            assert many.disabled(op)
            with many.reference(op):
                assert many.disabled(op) == "by prequal.reference() in this scope"
            many.enable(op)
            assert many.disabled(op) is None

    with ThreadPoolExecutor(len(ops)) as pool:
        list(pool.map(work, ops))
    assert not any(many.disabled(op) for op in ops)


# ---- the public functions --------------------------------------------------------------------------------------------


def scoped() -> int:
    if state.native is None:
        pytest.skip(f"no native module: {state.native_problem}")
    return int(state.native.scoped_flags(0))


def test_the_native_side_asks_while_a_scope_is_open_and_no_longer():
    before = scoped()

    def steps():
        with prequal.reference("knn"):
            yield

    with prequal.reference("knn"), prequal.reference():
        assert scoped() == before + 2
        with pytest.raises(ValueError, match="expected"):
            prequal.reference("nonsense")
        generator = steps()
        next(generator)
        assert scoped() == before + 3
    generator.close()
    with pytest.raises(KeyError), prequal.reference("knn"):
        raise KeyError
    assert scoped() == before

    def work(_: int) -> None:
        for _ in range(100):
            with prequal.reference("knn"), prequal.strict(False):
                pass

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert scoped() == before


def test_a_disabled_op_is_closed_at_once_and_open_again_when_enabled(machine, make_host):
    host = machine(make_host((9, 0)))
    x = torch.ones(2, 8)
    prequal.rms_norm(x)
    assert host.opened() == {("rms_norm", 0)}
    prequal.disable("rms_norm")
    assert host.opened() == set()
    prequal.rms_norm(x)
    assert host.opened() == set()
    prequal.enable("rms_norm")
    prequal.rms_norm(x)
    assert host.opened() == {("rms_norm", 0)}
    assert prequal.stats()["rms_norm"]["cuda:0"] == {"fast": 2, "reference": {"disabled_by_flag": 1}}
    assert host.quick_runs[("rms_norm", 0)] == 1


def test_a_scope_sends_only_its_own_calls_to_the_reference(machine, make_host):
    machine(make_host((9, 0)))
    x = torch.ones(2, 8)
    barrier = threading.Barrier(2)

    def work(in_scope: bool) -> None:
        if in_scope:
            with prequal.reference("rms_norm"):
                barrier.wait(30)
                for _ in range(5):
                    prequal.rms_norm(x)
                barrier.wait(30)
        else:
            barrier.wait(30)
            for _ in range(7):
                prequal.rms_norm(x)
            barrier.wait(30)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (True, False)))
    assert prequal.stats()["rms_norm"]["cuda:0"] == {"fast": 7, "reference": {"disabled_by_flag": 5}}


def test_the_public_functions_list_near_matches():
    for call in (prequal.disable, prequal.enable, prequal.reference, prequal.explain):
        with pytest.raises(prequal.UnknownOpError, match="did you mean rms_norm"):
            call("rmsnorm")


@pytest.mark.gpu
def test_a_scope_holds_on_the_gpu_for_its_thread_alone(cuda):
    x = torch.ones(2, 8, device=cuda)
    prequal.rms_norm(x)
    prequal.reset_stats()
    barrier = threading.Barrier(2)

    def work(in_scope: bool) -> None:
        with prequal.reference("rms_norm" if in_scope else "knn"):
            barrier.wait(30)
            for _ in range(50):
                prequal.rms_norm(x)
            barrier.wait(30)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (True, False)))
    assert prequal.stats()["rms_norm"][str(cuda)] == {"fast": 50, "reference": {"disabled_by_flag": 50}}
