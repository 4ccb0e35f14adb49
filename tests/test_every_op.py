"""What holds for every op, over the registry: a new op is under these tests by being declared."""

from __future__ import annotations

import functools
import inspect
import pathlib
import re
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, library
from torch._subclasses.fake_tensor import FakeTensorMode

import prequal
import prequal.bench.cases
from prequal import registry
from prequal import runtime_state as state
from prequal.registry import OPS, Op, Sample

pytestmark = pytest.mark.usefixtures("bitwise_paths_serve")
prequal.bench.cases.shape_lists()  # costs are declared beside the shapes
REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
EVERY_OP = [pytest.param(op, id=name) for name, op in OPS.items()]
# Sample names are the same on every device, so the CPU's list serves as the list of cases.
EVERY_SAMPLE = [pytest.param(op, s.name, id=f"{name}-{s.name}") for name, op in OPS.items() for s in op.samples(CPU)]

every_op = pytest.mark.parametrize("op", EVERY_OP)
every_functional_op = pytest.mark.parametrize("op", [p for p in EVERY_OP if not p.values[0].mutates])
every_writing_op = pytest.mark.parametrize("op", [p for p in EVERY_OP if p.values[0].mutates])


def every_sample(function):
    return pytest.mark.usefixtures("paths_serve")(pytest.mark.parametrize(("op", "name"), EVERY_SAMPLE)(function))


@functools.lru_cache(maxsize=1)
def samples_of(op: Op, device: torch.device) -> dict[str, Sample]:
    return {sample.name: sample for sample in op.samples(device)}


def sample_of(op: Op, name: str, device: torch.device) -> Sample:
    return samples_of(op, device)[name]


def quick(op: Op, device: torch.device) -> Sample:
    return next(iter(op.samples(device)))


def public(op: Op):
    return getattr(prequal, op.name)


def tensors(values) -> list[Tensor]:
    return [values] if isinstance(values, Tensor) else [v for v in values or () if isinstance(v, Tensor)]


def is_real(x) -> bool:
    """A floating tensor that torch has arithmetic for: of FP8 it has none."""
    return isinstance(x, Tensor) and x.is_floating_point() and x.element_size() > 1


def flipped(x: Tensor) -> Tensor:
    """Rows in reverse order; of FP8 by its bits."""
    return x.flip(0) if x.element_size() > 1 else x.view(torch.uint8).flip(0).view(x.dtype)


def answer(op: Op, function, *args, **kwargs):
    """What `function(*args, **kwargs)` answers; of an op that writes into arguments, these as it leaves them."""
    return op.outcome(lambda every: op._call(function, every), op.bind(args, kwargs))


def result(op: Op, out, args: Sequence):
    """What a call that answered `out` left: that, or the arguments that it wrote into."""
    return tuple(args[op.arguments.index(name)] for name in op.mutates) if op.mutates else out


def differentiable(op: Op, device: torch.device) -> Iterator[tuple[tuple, list[int]]]:
    """The quick sample in fp32 and in fp64, with the floating arguments asking for gradients."""
    for dtype in (torch.float32, torch.float64):
        args = [x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in quick(op, device).args]
        places = [i for i, x in enumerate(args) if isinstance(x, Tensor) and x.is_floating_point()]
        yield tuple(x.clone().requires_grad_() if i in places else x for i, x in enumerate(args)), places


# ---- the answer --------------------------------------------------------------------------------------------------


@every_sample
def test_the_public_call_keeps_the_contract(op, name, device):
    sample = sample_of(op, name, device)
    got = answer(op, public(op), *sample.args, **sample.kwargs)
    want = answer(op, op.reference, *sample.args, **sample.kwargs)
    assert op.contract.compare(got, want) is None


@pytest.mark.gpu
@every_sample
def test_the_kernel_serves_every_call_that_meets_its_needs(op, name, cuda):
    sample = sample_of(op, name, cuda)
    bound = op.bind(sample.args, sample.kwargs)
    need = op.unmet_need(bound)
    answer(op, public(op), *sample.args, **sample.kwargs)
    seen = prequal.stats()[op.name][str(cuda)]
    if need is None:
        assert seen == {"fast": 1, "reference": {}}
    else:
        assert seen == {"fast": 0, "reference": {f"unsupported_input:{need.name}": 1}}


@pytest.mark.gpu
@every_sample
def test_two_runs_give_the_same_bits(op, name, cuda):
    sample = sample_of(op, name, cuda)
    first, second = (tensors(answer(op, public(op), *sample.args, **sample.kwargs)) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert prequal.contracts.Bitwise().compare(a, b) is None


@every_sample
def test_tracing_tells_the_shape_dtype_and_strides_of_the_answer(op, name, device):
    sample = sample_of(op, name, device)
    want = [] if op.mutates else tensors(op.answer(op.bind(sample.args, sample.kwargs)))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in sample.args]
        out = public(op)(*fake, **sample.kwargs)
    got = [] if op.mutates else tensors(out)
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
        assert b.is_contiguous()
        assert a.is_contiguous()


@every_functional_op
def test_the_answer_is_fresh_memory(op, device):
    args = quick(op, device).args
    out = tensors(public(op)(*args))
    inputs = {x.untyped_storage().data_ptr() for x in tensors(args)}
    assert all(x.untyped_storage().data_ptr() not in inputs for x in out)


@every_op
def test_a_call_leaves_its_arguments_as_they_were(op, device):
    args = op.bind(quick(op, device).args)
    before = [x.clone() if isinstance(x, Tensor) else x for x in args]
    public(op)(*quick(op, device).args)
    op._call(public(op), args)
    for name, a, b in zip(op.arguments, before, args, strict=True):
        if isinstance(a, Tensor):
            assert torch.equal(a, b) == (name not in op.mutates), name


@every_writing_op
def test_an_op_that_writes_answers_the_one_that_it_wrote_into_and_tells_autograd(op, device):
    args = op.bind(quick(op, device).args)
    one = args[op.arguments.index(op.mutates[0])] if len(op.mutates) == 1 else None
    for function, answers in ((public(op), one), (op.packet, None), (torch.compile(public(op), backend="eager"), one)):
        before = [x._version for x in tensors(args)]
        assert op._call(function, args) is answers
        for name, x, version in zip(op.arguments, args, before, strict=False):
            if isinstance(x, Tensor):
                assert (x._version > version) == (name in op.mutates), name


@every_writing_op
def test_an_op_that_writes_does_so_in_inference_mode(op, device):
    args = quick(op, device).args
    want = answer(op, op.reference, *args)
    with torch.inference_mode():
        made = [x.clone() if isinstance(x, Tensor) else x for x in args]
        for function in (public(op), op.packet):
            inputs = op.bind([x.clone() if isinstance(x, Tensor) else x for x in made])
            op._call(function, inputs)
            assert op.contract.compare(result(op, None, inputs), want) is None


@every_writing_op
def test_a_call_whose_memory_is_shared_writes_nothing(op, device):
    """Two outputs, or an output and what it is made of: an answer by halves would be neither the one nor the other."""
    calls = [call for call in op.wrong_calls(device) if "memory" in call.match or "a place of its own" in call.match]
    assert calls, "an op that writes declares calls whose memory is shared"
    for call in calls:
        args = op.bind(call.args, call.kwargs)
        before = [x.clone() for x in tensors(args)]
        with pytest.raises(ValueError, match=call.match):
            op._call(public(op), args)
        assert all(torch.equal(x, y) for x, y in zip(tensors(args), before, strict=True))


@every_writing_op
def test_an_op_that_writes_records_no_gradient(op, device):
    args = list(op.bind(quick(op, device).args))
    for place in (op.arguments.index(name) for name in op.mutates):
        if not args[place].is_floating_point():
            continue  # integers have none
        asking = [x.clone().requires_grad_() if i == place else x for i, x in enumerate(args)]
        for function in (public(op), op.packet):
            with pytest.raises(RuntimeError, match=f"{op.name}: writes into .* and has no gradient; call"):
                op._call(function, asking)
            with torch.no_grad():
                op._call(function, asking)


@every_sample
def test_a_declared_cost_is_a_floor_that_no_call_beats(op, name):
    """Inputs read once and outputs written once are the most that it may count."""
    sample = sample_of(op, name, CPU)
    args = op.bind(sample.args, sample.kwargs)
    cost = op.cost_of(args)
    if cost is None:
        pytest.skip("declares none")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in args]
        out = tensors(result(op, op._call(op.packet, fake), fake))
    total = sum(x.numel() * x.element_size() for x in (*tensors(args), *out))
    assert 0 <= cost.bytes <= total
    assert cost.flops >= 0
    assert cost.unit in ("fp32", "bf16")


# ---- the wrong call ----------------------------------------------------------------------------------------------


@every_op
@pytest.mark.parametrize("road", ["public", "torch.ops", "reference scope"])
def test_a_wrong_call_is_the_same_error_on_every_road(op, road, device):
    calls = op.wrong_calls(device)
    if road == "torch.ops":
        # torch's own schema check speaks where an argument is of the wrong kind
        calls = [
            call
            for call in calls
            if call.error is ValueError or all(isinstance(x, Tensor) for x in (*call.args, *call.kwargs.values()))
        ]
    assert calls, "an op declares its wrong calls, some of them of the right kinds"
    for call in calls:
        function = op.packet if road == "torch.ops" else public(op)
        with prequal.reference(*([op.name] if road == "reference scope" else ["knn_gather"])):
            if road == "public":
                with prequal.strict(False), pytest.raises(call.error, match=call.match):
                    function(*call.args, **call.kwargs)
            else:
                with pytest.raises(call.error, match=call.match):
                    function(*call.args, **call.kwargs)


@every_op
def test_a_wrong_call_is_not_counted(op, device):
    calls = op.wrong_calls(device)
    assert calls, "an op declares its wrong calls"
    for call in calls:
        with pytest.raises(call.error):
            public(op)(*call.args, **call.kwargs)
    assert op.name not in prequal.stats()


@every_op
def test_sparse_and_meta_tensors_are_no_crash(op, device):
    args = list(quick(op, device).args)
    first = args[0]
    with pytest.raises(TypeError, match="dense tensor, got one with layout sparse"):
        public(op)(first.float().to_sparse(), *args[1:])
    meta = public(op)(*(x.to("meta") if isinstance(x, Tensor) else x for x in args))
    assert all(x.device.type == "meta" for x in tensors(meta))


# ---- torch.library -----------------------------------------------------------------------------------------------


@every_op
def test_opcheck(op, device):
    calls = [quick(op, device).args, *([] if op.mutates else [next(differentiable(op, device))[0]])]
    for args in calls:
        if any(x.is_floating_point() and not is_real(x) for x in tensors(args)):
            continue  # it multiplies arguments, to see whether they moved
        checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
        out = [] if op.mutates else tensors(op.reference(*args))
        if any(x.requires_grad for x in out) and not is_real(out[0]):
            checks.pop()  # it adds outputs up in place, floats to an integer; compiled gradients have a test below
        check = functools.partial(library.opcheck, test_utils=checks)
        op._call(lambda *a, **named: check(op.packet.default, a, named), op.bind(args))  # noqa: B023


@pytest.fixture(autouse=True)
def no_compiled_code_of_other_ops():
    """One test compiles the same function for every op: dynamo gives up at the ninth."""
    torch.compiler.reset()


@every_op
def test_it_compiles_without_a_graph_break(op, device):
    args = quick(op, device).args
    got = answer(op, torch.compile(public(op), fullgraph=True, backend="aot_eager"), *args)
    assert op.contract.compare(got, answer(op, op.reference, *args)) is None


# Sizes that a contract says: of these alone compiled code may be.
FIXED = {
    "cross_entropy": {"coefficients": 1, "stats": 1},
    "knn": {"queries": 1, "references": 1},
    "qk_rms_norm_cross": {"kv": 1, "grad_kv": 1},
    "qk_rms_norm_rope_qkv": {"qkv": 1, "grad": 1, "coords": 1},
}


@every_op
def test_no_size_becomes_a_constant_of_the_compiled_code(op, device):
    """`mark_dynamic` raises where a size that it names is specialised."""
    args = quick(op, device).args
    want = answer(op, op.reference, *args)
    bound = dict(zip(op.arguments, args, strict=False))

    def call(*inputs):
        for name, x in zip(bound, inputs, strict=True):
            for dim, size in enumerate(x.shape if isinstance(x, Tensor) else ()):
                if size > 1 and FIXED.get(op.basename, {}).get(name) != dim:
                    torch._dynamo.mark_dynamic(x, dim)
        return torch.compile(public(op), fullgraph=True, backend="aot_eager")(*inputs)

    assert op.contract.compare(op.outcome(lambda every: call(*every[: len(args)]), op.bind(args)), want) is None


@every_op
def test_it_compiles_inside_a_callers_function_and_module(op, device):
    args = quick(op, device).args
    torch.compiler.reset()  # of this function, torch compiles eight ops and no more

    class Module(torch.nn.Module):
        def forward(self, *inputs):
            return public(op)(*inputs), None if op.mutates else public(op)(*inputs)

    def call(*inputs):
        return public(op)(*inputs)

    want = answer(op, op.reference, *args)
    for backend in ("eager", "aot_eager"):
        compiled = torch.compile(call, fullgraph=True, backend=backend)
        assert op.contract.compare(op.outcome(lambda every: compiled(*every), args), want) is None  # noqa: B023
        module = torch.compile(Module(), fullgraph=True, backend=backend)
        if op.mutates:
            got = op.outcome(lambda every: module(*every), args)  # noqa: B023
            assert op.contract.compare(got, want) is None
            continue
        for each in module(*args):
            assert op.contract.compare(each, want) is None


@every_functional_op
def test_a_compiled_function_has_the_gradients_of_the_eager_one(op, device):
    (args, places), _ = differentiable(op, device)
    if not any(x.requires_grad for x in tensors(op.reference(*args))):
        pytest.skip(f"{op.name} has no gradient here")

    def loss(*inputs):
        return sum(x.square().sum() for x in tensors(public(op)(*inputs)) if is_real(x))

    torch.compiler.reset()
    inputs = [args[i] for i in places]
    want = torch.autograd.grad(loss(*args), inputs, allow_unused=True, materialize_grads=True)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(*args), inputs, allow_unused=True, materialize_grads=True)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@every_functional_op
def test_functional_transforms_are_those_of_the_reference(op, device):
    """grad, forward mode, grad under vmap: a custom op of torch has no rules for these, so the reference answers."""
    _, (args, places) = differentiable(op, device)
    args = tuple(x.detach() if isinstance(x, Tensor) else x for x in args)

    def total(function):
        def of(*inputs):
            every = list(args)
            for i, x in zip(places, inputs, strict=True):
                every[i] = x
            # what stands for "nothing" in an output may be infinite, and its share of the tangent then 0 * inf
            outputs = (torch.nan_to_num(x, nan=torch.nan, posinf=0.0) for x in tensors(function(*every)) if is_real(x))
            return sum(x.square().sum() for x in outputs)

        return of

    inputs = [args[i] for i in places]
    where = tuple(range(len(places)))
    tangents = [torch.linspace(-1, 1, x.numel(), device=device, dtype=x.dtype).view(x.shape) for x in inputs]
    for transform in (
        lambda f: torch.func.grad(f, argnums=where)(*inputs),
        lambda f: torch.func.jvp(f, tuple(inputs), tuple(tangents)),
        lambda f: torch.func.vmap(torch.func.grad(f, argnums=where))(*(torch.stack([x, x + 1]) for x in inputs)),
    ):
        if not isinstance(total(op.reference)(*inputs), Tensor):
            pytest.skip(f"{op.name} has no floating output in its quick case")
        for got, want in zip(transform(total(public(op))), transform(total(op.reference)), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    seen = prequal.stats()[op.name][str(device)]
    assert seen["fast"] == 0
    assert set(seen["reference"]) == {"unsupported_input:transform"}


@every_functional_op
def test_a_forward_mode_tangent_is_not_dropped(op, device):
    import torch.autograd.forward_ad as forward

    (args, places), _ = differentiable(op, device)
    args = [x.detach() if isinstance(x, Tensor) else x for x in args]
    with forward.dual_level():
        for i in places:
            args[i] = forward.make_dual(args[i], torch.ones_like(args[i]))
        got, want = (
            [forward.unpack_dual(x).tangent for x in tensors(f(*args)) if is_real(x)]
            for f in (public(op), op.reference)
        )
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            torch.testing.assert_close(a, b)


@every_functional_op
def test_gradients_are_those_of_the_reference(op, device):
    compared = 0
    for args, places in differentiable(op, device):
        outputs = [x for x in tensors(public(op)(*args)) if is_real(x)]
        wants = [x for x in tensors(op.reference(*args)) if is_real(x)]
        if not outputs or not any(x.requires_grad for x in wants):
            continue
        weights = [torch.linspace(0.5, 1.5, x.numel(), device=device, dtype=x.dtype).view(x.shape) for x in wants]
        inputs = [args[i] for i in places]
        got = torch.autograd.grad(outputs, inputs, weights, allow_unused=True, materialize_grads=True)
        want = torch.autograd.grad(wants, inputs, weights, allow_unused=True, materialize_grads=True)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
            compared += 1
    if not compared:
        pytest.skip(f"{op.name} has no gradient in its quick case")


@every_op
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_changes_no_answer(op, device, dtype):
    sample = quick(op, device)
    want = answer(op, public(op), *sample.args, **sample.kwargs)
    for function in (public(op), op.packet):
        with torch.autocast(device.type, dtype=dtype):
            got = answer(op, function, *sample.args, **sample.kwargs)
        for a, b in zip(tensors(got), tensors(want), strict=True):
            assert prequal.contracts.Bitwise().compare(a, b) is None


@every_functional_op
@pytest.mark.parametrize("backward_too", [False, True])
def test_what_was_computed_under_autocast_has_the_gradients_of_what_was_not(op, device, backward_too):
    (args, places), _ = differentiable(op, device)
    inputs = [args[i] for i in places]
    found = []
    for on in (False, True):
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=on):
            outputs = [x for x in tensors(public(op)(*args)) if x.requires_grad]
        if not outputs:
            pytest.skip(f"{op.name} has no gradient here")
        weights = [torch.linspace(0.5, 1.5, x.numel(), device=device, dtype=x.dtype).view(x.shape) for x in outputs]
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=on and backward_too):
            found.append(torch.autograd.grad(outputs, inputs, weights, allow_unused=True, materialize_grads=True))
    for a, b in zip(*found, strict=True):
        assert prequal.contracts.Bitwise().compare(a, b) is None


@every_functional_op
def test_the_short_road_to_a_gradient_leads_where_the_dispatchers_does(op, device):
    (args, places), _ = differentiable(op, device)
    inputs = [args[i] for i in places]
    found = []
    for function in (public(op), op.packet):
        outputs = [x for x in tensors(function(*args)) if x.requires_grad]
        if not outputs:
            pytest.skip(f"{op.name} has no gradient here")
        weights = [torch.linspace(0.5, 1.5, x.numel(), device=device, dtype=x.dtype).view(x.shape) for x in outputs]
        found.append(torch.autograd.grad(outputs, inputs, weights, allow_unused=True, materialize_grads=True))
    for a, b in zip(*found, strict=True):
        assert prequal.contracts.Bitwise().compare(a, b) is None


@every_op
def test_vmap_is_a_call_an_element(op, device):
    args = quick(op, device).args
    stacked = [torch.stack([x, flipped(x)], dim=1) if isinstance(x, Tensor) else x for x in args]
    in_dims = tuple(1 if isinstance(x, Tensor) else None for x in args)
    wants = [answer(op, op.reference, *(x[:, i] if isinstance(x, Tensor) else x for x in stacked)) for i in range(2)]
    out = torch.vmap(public(op), in_dims=in_dims, out_dims=None if len(op.mutates) > 1 else 0)(*stacked)
    got = [x.movedim(1, 0) for x in result(op, None, stacked)] if op.mutates else tensors(out)
    for i, want in enumerate(wants):
        assert op.contract.compare([x[i] for x in got], tensors(want)) is None
    seen = prequal.stats()[op.name][str(device)]
    assert seen["fast"] + sum(seen["reference"].values()) == 2


@every_functional_op
def test_vmap_over_nothing_has_the_shape_of_nothing(op, device):
    args = quick(op, device).args
    none = [x.new_empty((0, *x.shape)) if isinstance(x, Tensor) else x for x in args]
    got = tensors(torch.vmap(public(op), in_dims=tuple(0 if isinstance(x, Tensor) else None for x in args))(*none))
    want = tensors(op.reference(*args))
    assert [(x.shape, x.dtype) for x in got] == [((0, *x.shape), x.dtype) for x in want]


@every_op
def test_a_dispatch_mode_sees_the_op(op, device, watching_dispatch):
    with watching_dispatch as seen:
        public(op)(*quick(op, device).args)
    assert op.packet.default in seen


@every_op
def test_a_tensor_subclass_goes_through_its_own_dispatch(op, device):
    seen = []

    class Loud(Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    args = [x.as_subclass(Loud) if isinstance(x, Tensor) else x for x in quick(op, device).args]
    public(op)(*args)
    assert op.packet in seen or op.packet.default in seen


@every_op
def test_keyword_arguments_are_the_positional_ones(op, device):
    args = quick(op, device).args
    bound = op.bind(args)
    want = answer(op, op.reference, *args)
    assert (
        op.contract.compare(result(op, public(op)(**dict(zip(op.arguments, bound, strict=True))), bound), want) is None
    )
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        public(op)(*quick(op, device).args, nonsense=1)


# ---- the current stream, graphs, devices -------------------------------------------------------------------------


@pytest.mark.gpu
@every_op
def test_the_kernel_runs_on_the_current_stream(op, cuda):
    """Behind a long piece of work on a side stream: a launch on another stream would read what is not written yet."""
    args = quick(op, cuda).args
    want = answer(op, op.reference, *args)
    answer(op, public(op), *args)
    late = [torch.zeros_like(x) if isinstance(x, Tensor) else x for x in args]
    busy = torch.rand(4096, 4096, device=cuda)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(30):
            busy = busy @ busy
            busy = busy / busy.norm()
        for x, source in zip(late, args, strict=True):
            if isinstance(x, Tensor):
                x.copy_(source)
        got = public(op)(*late)
    stream.synchronize()
    assert op.contract.compare(result(op, got, late), want) is None


@pytest.mark.gpu
@every_op
def test_a_captured_graph_replays_on_new_inputs(op, cuda):
    args = quick(op, cuda).args
    static = [x.clone() if isinstance(x, Tensor) else x for x in args]
    public(op)(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = public(op)(*static)
    for x in tensors(static):
        x.copy_(flipped(x))
    want = answer(op, op.reference, *static)
    graph.replay()
    torch.cuda.synchronize()
    assert op.contract.compare(result(op, out, static), want) is None
    assert prequal.stats()[op.name][str(cuda)]["reference"] == {}


@pytest.mark.gpu
@every_op
def test_a_first_use_inside_a_capture_is_answered_by_the_reference(op, cuda, monkeypatch):
    if state.gate.host.manifest.ops[op.basename].evidence:
        monkeypatch.setattr(state.gate.host, "manifest", state.gate.host.manifest.without_evidence())
    state.gate.unqualify()
    monkeypatch.setattr(type(state.gate.host), "capturing", lambda self: True)
    public(op)(*quick(op, cuda).args)
    assert prequal.stats()[op.name][str(cuda)] == {"fast": 0, "reference": {"not_qualified": 1}}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@every_op
def test_a_call_without_host_synchronisation(op, cuda):
    args = quick(op, cuda).args
    public(op)(*args)
    try:
        torch.cuda.set_sync_debug_mode("error")
        public(op)(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@every_op
def test_a_tensor_on_another_device_is_answered_there(op):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU: the device guard needs two")
    other = torch.device("cuda", 1)
    with torch.cuda.device(0):
        args = quick(op, other).args
        want = answer(op, op.reference, *args)
        got = result(op, public(op)(*args), args)
        assert all(x.device == other for x in tensors(got))
        assert torch.cuda.current_device() == 0
        assert op.contract.compare(got, want) is None
        assert prequal.stats()[op.name]["cuda:1"]["fast"] == 1
    first, second = (next(iter(tensors(quick(op, torch.device("cuda", i)).args))) for i in (0, 1))
    rest = quick(op, other).args[1:]
    if tensors(rest):
        with pytest.raises(ValueError, match="expected a tensor on cuda:0 like"):
            public(op)(first, *rest)
    del second


@pytest.mark.gpu
@every_sample
def test_attributes_say_what_the_exchange_says(op, name, cuda):
    """Older torch has no exchange API: the boundary then reads attributes, and must come to the same call."""
    sample = sample_of(op, name, cuda)
    by_exchange = op.compare_paths(sample)
    try:
        assert state.native.use_exchange_api(False) is False
        by_attributes = op.compare_paths(sample)
    finally:
        state.native.use_exchange_api(True)
    assert by_exchange == by_attributes


@pytest.mark.gpu
@every_op
def test_a_pending_negation_is_refused_not_ignored(op, cuda):
    args = [x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in quick(op, cuda).args]
    negated = torch.complex(torch.zeros_like(args[0]), -args[0]).conj().imag
    assert negated.is_neg()
    want = answer(op, op.reference, *args)
    got = result(op, public(op)(negated, *args[1:]), (negated, *args[1:]))
    assert op.contract.compare(got, want) is None
    assert prequal.stats()[op.name][str(cuda)]["reference"] == {"unsupported_input:negation": 1}


# ---- the house ---------------------------------------------------------------------------------------------------


@every_op
def test_the_docstring_tells_what_a_caller_must_know(op):
    text = op.reference.__doc__
    for section in ("Args:", "Returns:", "Raises:", "Contract:", "Source:"):
        assert section in text, f"{op.name}: the docstring has no {section!r}"
    for name in op.arguments:
        assert re.search(rf"^\s+{name}: ", text, re.M), f"{op.name}: the docstring does not describe {name}"
    assert inspect.getdoc(public(op)) == inspect.getdoc(op.reference)


@every_op
def test_one_basename_at_every_layer(op):
    for path in (
        f"src/ops/{op.basename}.cu",
        f"python/prequal/ops/{op.basename}.py",
        f"tests/ops/test_{op.basename}.py",
    ):
        assert (REPOSITORY / path).is_file(), path
    declared = re.search(rf"\b{op.name}\(\s*const Context&", (REPOSITORY / "src/ops.h").read_text())
    assert declared, f"src/ops.h: no launcher {op.name}"
    module = (REPOSITORY / "src/module.cpp").read_text()
    line = re.search(rf'def<ops::{op.name}>\(\s*m, "{op.name}",\s*{{([^}}]*)}}\);', module)  # a long one is wrapped
    assert line, f"src/module.cpp: no line for {op.name}"
    assert tuple(re.findall(r'"(\w+)"', line[1])) == op.arguments


def test_every_file_of_ops_is_exported_and_declares_a_kernel():
    files = {path.stem for path in (REPOSITORY / "python/prequal/ops").glob("[!_]*.py")}
    assert {op.basename for op in OPS.values()} == files, "an op's export in python/prequal/ops/__init__.py is missing"
    for name, op in OPS.items():
        assert op.has_kernel, f"{name}: its file ends without {name}.kernel(needs=[...])"
        assert getattr(prequal, name).op is op, f"{name} is not exported by python/prequal/ops/__init__.py"


@every_op
def test_samples_do_not_follow_the_callers_defaults(op):
    before = [[(x.dtype, x.shape) for x in tensors(s.args)] for s in op.samples(CPU)]
    torch.set_default_dtype(torch.float64)
    try:
        after = [[(x.dtype, x.shape) for x in tensors(s.args)] for s in op.samples(CPU)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert before == after


def test_every_kernel_is_known_by_the_op_that_launches_it():
    """Before an op opens on a device, its kernels are loaded there, and no others."""
    torchs = {op.basename for op in OPS.values() if op.name in state.through_torch}  # no kernels of ours
    for path in (REPOSITORY / "src/ops").glob("*.cu"):
        says = re.findall(r'^struct Unit : FileOf<"(\w+)"> \{\};$', path.read_text(), re.M)
        assert len(says) == (path.stem not in torchs), path.name
        assert all(f"{path.stem}_".startswith(f"{name}_") for name in says), path.name
    if state.native is None:
        pytest.skip(f"no native module: {state.native_problem}")
    counts = state.native.kernels()
    assert counts.keys() == {op.basename for op in OPS.values()} - torchs
    assert all(count > 0 for count in counts.values())


@pytest.mark.gpu
@every_op
def test_an_op_loads_the_kernels_of_its_basename_and_no_others(op, cuda):
    counts = state.native.kernels()
    assert state.preload(cuda.index, op.basename) == counts.get(op.basename, 0)
    assert state.preload(cuda.index) == sum(counts.values())


def test_every_launcher_is_an_op_and_every_op_a_launcher():
    if state.native is None:
        pytest.skip(f"no native module: {state.native_problem}")
    assert sorted(state.native.ops()) == sorted(OPS)
    assert sorted(state.native_ops) == sorted(registry.OPS)


@every_op
def test_the_quick_case_is_small(op):
    """It runs at first use in production."""
    sizes = [x.numel() for x in tensors(quick(op, CPU).args)]
    assert max(sizes) <= 4096
    assert quick(op, CPU).name == "quick"


@every_op
def test_sample_names_are_unique(op):
    names = [sample.name for sample in op.samples(CPU)]
    assert len(names) == len(set(names))
