"""One op, declared once: the PyTorch reference is the schema, the fake, the fallback, the oracle and the documentation.

`@op(...)` on the reference makes the public function. In plain eager it calls the native launcher straight, where
gradients are recorded inside an autograd.Function; under torch.compile, functorch, a TorchDispatchMode or with a tensor
subclass it goes through torch.ops.prequal. Whatever the native side does not answer is answered by the reference,
counted, with its reason.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, library

from . import runtime_state as state
from .constraints import Need
from .contracts import Contract, Mismatch
from .errors import UnknownOpError
from .runtime.reasons import Reason, unsupported

NAMESPACE = "prequal"
_DIFFERENTIATES = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)
LIBRARY = library.Library(NAMESPACE, "FRAGMENT")
OPS: dict[str, Op] = {}

# Answers of the native side that mean "not by this road", as opposed to "not by this kernel".
_OTHER_ROADS = frozenset({"mode", "forward", "subclass", "grad", "foreign", "not_attached"})


@dataclass(frozen=True)
class Sample:
    """Arguments of one right call, for the tests of every op and for qualification."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BadCall:
    """Arguments of one wrong call, and the error that it must raise on every path."""

    args: tuple[Any, ...]
    error: type[Exception]
    match: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cost:
    """What one call cannot do without: a lower bound that no implementation beats, whatever it really does."""

    bytes: int  # inputs read once, outputs written once
    flops: int = 0
    unit: str = "fp32"  # which measured rate bounds the FLOPs: "fp32" or "bf16" (tensor cores)


class OpFunction(Protocol):
    """What `@op` makes of a reference: the public function, with the declarations that follow it."""

    op: Op

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def check(self, function: Callable[..., None]) -> Callable[..., None]:
        """Declare what a right call is: raises ValueError or TypeError for a wrong one."""
        ...

    def fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Declare shapes and dtypes of the outputs where tracing the reference would not tell them."""
        ...

    def backward(
        self,
        function: Callable[..., Any] | None = None,
        *,
        of: Sequence[str] | None = None,
        saves: Sequence[str] | None = None,
        keeps: Sequence[int] | None = None,
        constant: Sequence[str] = (),
    ) -> Callable[..., Any]:
        """Declare the gradient, `function(saved, kept, *grads) -> {argument: grad}`.

        `saved` holds arguments by name, and in `saved.wanted` the names whose gradients are asked for; `kept` is a
        list of outputs. Alone or with keywords: `of`, the arguments that it answers for (where another one asks, the
        reference is differentiated; default: all); `saves`, the tensors that it needs (default: all); `keeps`, the
        numbers of the outputs that it needs (default: those that are integers); `constant`, floating arguments that
        have no gradient: where no others ask, the outputs do not require one.
        """
        ...

    def bad_calls(self, function: Callable[[torch.device], Iterable[BadCall]]) -> Any:
        """Declare wrong calls for the tests."""
        ...

    def cost(self, function: Callable[..., Cost]) -> Callable[..., Cost]:
        """Declare the bytes and FLOPs of a call, from its arguments alone: what benchmarks hold times against."""
        ...

    def kernel(self, *, needs: Sequence[Need] = (), through: Callable[..., Any] | None = None) -> None:
        """Declare that src/ops has a launcher of this name, and what it needs of a right call.

        through: where the fast path is a call of torch's and not a kernel of ours. The launcher is then the door alone
        (route, checks, gate, counter) and answers nothing; `through` answers, from all arguments by position.
        """
        ...


class Saved(dict[str, Any]):
    """Arguments of a call whose gradient is computed, by name."""

    wanted: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Gradient:
    """A declared gradient: see `OpFunction.backward`."""

    formula: Callable[..., Mapping[str, Any]]
    of: frozenset[str]
    saves: frozenset[str]
    keeps: frozenset[int] | None
    constant: frozenset[str]


def op(
    *, samples: Callable[[torch.device], Iterable[Sample]], contract: Contract, mutates: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], OpFunction]:
    """Declare an op. The first sample is the quick case: small, and run at first use where no evidence covers a GPU.

    mutates: the arguments that it writes into. Such an op has no gradient: recording one raises. It returns the
    argument where that is one, as torch's own do, and else None; in torch.ops, None.
    """

    def declare(reference: Callable[..., Any]) -> OpFunction:
        return Op(reference, samples, contract, tuple(mutates)).function

    return declare


class Op:
    """An op and everything that is said about it."""

    def __init__(
        self,
        reference: Callable[..., Any],
        samples: Callable[[torch.device], Iterable[Sample]],
        contract: Contract,
        mutates: tuple[str, ...] = (),
    ) -> None:
        self.reference = reference
        self.mutates = mutates
        self.name = reference.__name__
        self.basename = reference.__module__.rpartition(".")[2]
        self.samples = samples
        self.contract = contract
        self.signature = inspect.signature(reference)
        self.arguments = tuple(self.signature.parameters)
        self._defaults = tuple(parameter.default for parameter in self.signature.parameters.values())
        # torch gives keyword-only tensors no gradient and no vmap: below the public function all go by position
        self._positional = inspect.Signature(
            [p.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for p in self.signature.parameters.values()]
        )
        self.needs: tuple[Need, ...] = ()
        self.has_kernel = False
        self._checks: Callable[..., None] = lambda *args: None
        self._fake: Callable[..., Any] = (lambda *args, **kwargs: None) if mutates else reference
        self._gradient: Gradient | None = None
        self._bad_calls: Callable[[torch.device], Iterable[BadCall]] = lambda device: ()
        self._cost: Callable[..., Cost] | None = None

        self._register()
        self.function = self._make_function()
        OPS[self.name] = self

    # ---- declarations that follow the reference -------------------------------------------------------------------

    def check(self, function: Callable[..., None]) -> Callable[..., None]:
        self._checks = function
        return function

    def fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        self._fake = function
        return function

    def backward(
        self,
        function: Callable[..., Any] | None = None,
        *,
        of: Sequence[str] | None = None,
        saves: Sequence[str] | None = None,
        keeps: Sequence[int] | None = None,
        constant: Sequence[str] = (),
    ) -> Callable[..., Any]:
        def declare(formula: Callable[..., Any]) -> Callable[..., Any]:
            self._gradient = Gradient(
                formula,
                frozenset(self.arguments if of is None else of),
                frozenset(self.arguments if saves is None else saves),
                None if keeps is None else frozenset(keeps),
                frozenset(constant),
            )
            return formula

        return declare if function is None else declare(function)

    def bad_calls(self, function: Callable[[torch.device], Iterable[BadCall]]) -> Any:
        self._bad_calls = function
        return function

    def cost(self, function: Callable[..., Cost]) -> Callable[..., Cost]:
        self._cost = function
        return function

    def kernel(self, *, needs: Sequence[Need] = (), through: Callable[..., Any] | None = None) -> None:
        self.has_kernel = True
        self.needs = tuple(needs)
        state.native_ops[self.name] = self
        if through is not None:
            state.through_torch[self.name] = through
        self._globals["native"] = state.native_function(self.name)

    def wrong_calls(self, device: torch.device) -> list[BadCall]:
        return list(self._bad_calls(device))

    def cost_of(self, args: Sequence[Any]) -> Cost | None:
        """The declared cost of this right call; None where the op declares none."""
        return None if self._cost is None else self._call(self._cost, args)

    # ---- torch.library --------------------------------------------------------------------------------------------

    def _register(self) -> None:
        # torch gives keyword-only tensors neither autograd nor vmap: in the schema every argument has a place
        schema = library.infer_schema(self.reference, mutates_args=self.mutates)
        if self.mutates:  # what the dispatcher runs may not return an argument
            schema = f"{schema.partition(' -> ')[0]} -> ()"
        self.schema = schema.replace("*, ", "")
        qualified = f"{NAMESPACE}::{self.name}"
        LIBRARY.define(f"{self.name}{self.schema}")
        LIBRARY.impl(self.name, self._dispatched, "CompositeExplicitAutograd")
        library.register_fake(qualified, self._traced, lib=LIBRARY)
        if self.mutates:
            LIBRARY.impl(self.name, self._refuse_grad, "Autograd", with_keyset=True)
        else:
            library.register_autograd(qualified, self._vjp, setup_context=self._save, lib=LIBRARY)
        library.register_vmap(qualified, self._vmapped, lib=LIBRARY)
        self.packet = getattr(getattr(torch.ops, NAMESPACE), self.name)
        self._recorded = self._make_recorded()

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> tuple[Any, ...]:
        """All arguments in the order of the signature, defaults filled in. Keyword-only ones may come by position."""
        bound = self._positional.bind(*args, **(kwargs or {}))
        bound.apply_defaults()
        return tuple(bound.arguments[name] for name in self.arguments)

    def _call(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Call a function that has this op's signature, keyword-only arguments by name."""
        positional, named = self.passed(args)
        return function(*positional, **named)

    def passed(self, args: Sequence[Any], *, defaults: bool = True) -> tuple[list[Any], dict[str, Any]]:
        """Bound arguments as a caller passes them: by position, and the keyword-only ones by name; without `defaults`,
        only those of them that say more than their default."""
        positional, named = [], {}
        for value, (name, parameter) in zip(args, self.signature.parameters.items(), strict=True):
            if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
                positional.append(value)
            elif defaults or isinstance(value, Tensor) or value != parameter.default:
                named[name] = value
        return positional, named

    def _dispatched(self, *args: Any, **kwargs: Any) -> Any:
        # The dispatcher drops trailing defaults. inspect's bind costs 10 us a call, as much as a whole op.
        out = self.answer(self.bind(args, kwargs) if kwargs else args + self._defaults[len(args) :])
        return None if self.mutates else out

    def _traced(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.bind(args, kwargs)
        self.validate(bound)
        with without_autocast(self.device_of(bound)):
            return self._call(self._fake, bound)

    def _vmapped(self, info: Any, in_dims: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Under torch.vmap: one call an element, each by the fast path where it can, then stacked."""
        shared = [n for n, dim in zip(self.arguments, in_dims, strict=False) if n in self.mutates and dim is None]
        if shared:
            raise ValueError(f"{self.name}: every element of the batch would write into the one {shared[0]}")

        def element(i: int) -> Any:
            return self.packet(*(x if dim is None else x.select(dim, i) for x, dim in _pairs(args, in_dims)), **kwargs)

        if self.mutates:
            for i in range(info.batch_size):
                element(i)
            return None, None
        if info.batch_size == 0:  # what one element would give says the shape
            one = [
                x if d is None else x.new_zeros([n for i, n in enumerate(x.shape) if i != d])
                for x, d in _pairs(args, in_dims)
            ]
            outputs = self.packet(*one, **kwargs)
            if isinstance(outputs, Tensor):
                return outputs.new_empty((0, *outputs.shape)), 0
            return tuple(x.new_empty((0, *x.shape)) for x in outputs), tuple(0 for _ in outputs)
        each = [element(i) for i in range(info.batch_size)]
        if isinstance(each[0], Tensor):
            return torch.stack(each), 0
        return tuple(torch.stack(column) for column in zip(*each, strict=True)), tuple(0 for _ in each[0])

    # ---- gradients ------------------------------------------------------------------------------------------------

    def _make_recorded(self) -> Any:
        """The call with its gradient, without the dispatcher: the registered op's road to the same costs several times
        a small kernel."""

        def forward(ctx: Any, *args: Any) -> Any:
            out = self._call(self.function, args)  # no gradients are recorded in here
            self._save(ctx, args, out)
            return out

        body = {"forward": staticmethod(forward), "backward": staticmethod(self._vjp)}
        return type(self.name, (torch.autograd.Function,), body)

    def _refuse_grad(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
            raise RuntimeError(self._no_gradient())
        with torch._C._AutoDispatchBelowAutograd():
            return self.packet.default.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)

    def _no_gradient(self) -> str:
        fresh = self.name.removesuffix("_inplace").rstrip("_")
        instead = f"call {fresh}, or this under torch.no_grad()" if fresh in OPS else "call it under torch.no_grad()"
        return f"{self.name}: writes into {' and '.join(self.mutates)} and has no gradient; {instead}"

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: Any, keyword_only_inputs: Any = None) -> None:
        outputs = (output,) if isinstance(output, Tensor) else tuple(output)
        named = dict(zip(self.arguments, inputs, strict=False)) | dict(keyword_only_inputs or {})
        tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
        asking = {name for name, asks in zip(self.arguments, ctx.needs_input_grad, strict=False) if asks}
        for name in asking & tensors.keys():
            if tensors[name].is_complex():  # said, where it would be lost: what comes out counts as no float
                got = str(tensors[name].dtype).removeprefix("torch.")
                raise TypeError(f"{self.name}: {name}: expected a real dtype where a gradient is wanted, got {got}")
        still = self._has_no_gradient(asking)
        ctx.mark_non_differentiable(*(value for value in outputs if still or not value.is_floating_point()))
        kept: Sequence[Tensor] = ()
        ctx.gradient = gradient = self._gradient
        if gradient is not None and asking & tensors.keys() <= gradient.of:
            tensors = {name: value for name, value in tensors.items() if name in gradient.saves}
            kept = [
                value
                for i, value in enumerate(outputs)
                if (not value.is_floating_point() if gradient.keeps is None else i in gradient.keeps)
            ]
        else:
            ctx.gradient = None
        ctx.inputs = len(inputs)
        ctx.saved_names = tuple(tensors)
        ctx.plain = {name: value for name, value in named.items() if not isinstance(value, Tensor)}
        ctx.save_for_backward(*tensors.values(), *kept)

    def _has_no_gradient(self, asking: Collection[str]) -> bool:
        return self._gradient is not None and self._gradient.constant.issuperset(asking)

    def _vjp(self, ctx: Any, *grads: Any) -> Any:
        """Gradients of the floating tensor arguments: the declared formula, or the reference differentiated again."""
        with without_autocast(self.device_of(grads)):
            return self._gradients(ctx, grads)

    def _gradients(self, ctx: Any, grads: Sequence[Any]) -> Any:
        tensors = ctx.saved_tensors
        saved = Saved({**ctx.plain, **dict(zip(ctx.saved_names, tensors, strict=False))})
        kept = tensors[len(ctx.saved_names) :]
        wanted = [name for name, asks in zip(self.arguments, ctx.needs_input_grad, strict=False) if asks]

        found: Mapping[str, Any]
        if ctx.gradient is not None:
            saved.wanted = frozenset(wanted)
            found = ctx.gradient.formula(saved, kept, *(_spread(grad) for grad in grads))
        else:
            wanted = [name for name in wanted if saved[name].is_floating_point()]

            def reference(*primals: Tensor) -> Any:
                named = {**saved, **dict(zip(wanted, primals, strict=True))}
                return self._call(self.reference, [named[name] for name in self.arguments])

            pull_back = torch.func.vjp(reference, *(saved[name] for name in wanted))[1]
            found = dict(zip(wanted, pull_back(grads[0] if len(grads) == 1 else grads), strict=True))
        return tuple(found.get(name) if name in wanted else None for name in self.arguments[: ctx.inputs])

    # ---- the public function --------------------------------------------------------------------------------------

    def _make_function(self) -> OpFunction:
        """A function with the reference's own signature: no *args to bind, nothing for torch.compile to guess."""
        declared, passed, in_order = [], [], []
        # torch.compile looks globals up by importing the module of that name: the function needs one of its own.
        home = types.ModuleType(f"prequal._calls.{self.name}")
        sys.modules[home.__name__] = home
        self._globals: dict[str, Any] = home.__dict__
        self._globals |= {
            "is_tracing": torch.compiler.is_dynamo_compiling,
            "jit_tracing": torch._C._get_tracing_state,  # torch.jit.trace; other tracers are dispatch modes
            "packet": self.packet,
            "native": state.absent,
            "elsewhere": self._elsewhere,
            "failed": self._failed,
            "written": torch.autograd.graph.increment_version,
        }
        keyword_only = False
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not keyword_only:
                keyword_only = True
                declared.append("*")
            has_default = parameter.default is not inspect.Parameter.empty
            self._globals[f"default_{name}"] = parameter.default
            declared.append(f"{name}=default_{name}" if has_default else name)
            passed.append(f"{name}={name}" if keyword_only else name)
            in_order.append(name)
        written = self.mutates[0] if len(self.mutates) == 1 else None
        values, values_by_name = ", ".join(in_order), ", ".join(passed)

        def answer(call: str) -> str:
            return f"{call}; return {written}" if self.mutates else f"return {call}"

        source = (
            f"def {self.name}({', '.join(declared)}):\n"
            f"    if is_tracing() or jit_tracing() is not None:\n"
            f"        {answer(f'packet({values_by_name})')}\n"
            f"    try:\n"
            f"        out = native({values})\n"
            f"    except RuntimeError:\n"
            f"        failed({values})\n"
            f"        raise\n"
            f"    if out is NotImplemented:\n"
            f"        {answer(f'elsewhere({values})')}\n"
        )
        if self.mutates:  # autograd must learn of it, or a value saved for some gradient has changed without a word
            source += f"    written(({', '.join(self.mutates)},))\n"
        source += f"    return {written if self.mutates else 'out'}\n"
        exec(compile(source, f"<prequal.{self.name}>", "exec"), self._globals)  # as dataclasses do
        function = self._globals[self.name]
        function.__doc__ = self.reference.__doc__
        function.__module__ = self.reference.__module__
        function.__annotations__ = dict(self.reference.__annotations__)
        function.op = self
        for declaration in (self.check, self.fake, self.backward, self.bad_calls, self.cost, self.kernel):
            setattr(function, declaration.__name__, declaration)
        return cast(OpFunction, function)

    def _elsewhere(self, *args: Any) -> Any:
        """The native side did not answer this call: by another road, behind the gate, or by the reference."""
        if not self.has_kernel:
            return self.fall_back(args, unsupported("kernel"))
        why = state.why()
        if why in _OTHER_ROADS:
            if is_transformed(args):
                return self.fall_back(args, unsupported("transform"))
            if needs_dispatcher(args):
                return self._call(self.packet, args)
            named = zip(self.arguments, args, strict=True)
            asking = {name for name, x in named if isinstance(x, Tensor) and x.requires_grad}
            if torch.is_grad_enabled() and asking:
                if self._has_no_gradient(asking):
                    with torch.no_grad():
                        return self._call(self.function, args)
                if not self.mutates:
                    return self._recorded.apply(*args)
                self.validate(args)
                raise RuntimeError(self._no_gradient())
        if why in _OTHER_ROADS or why in ("gate", "cpu"):
            return self.answer(args)
        return self.fall_back(args, unsupported(why))

    # ---- an answer ------------------------------------------------------------------------------------------------

    def device_of(self, args: Sequence[Any]) -> torch.device:
        for value in args:
            if isinstance(value, Tensor):
                return value.device
        return torch.device("cpu")

    def answer(self, args: Sequence[Any]) -> Any:
        """Below autograd and the modes: fast where the gate is open, else the reference."""
        device = self.device_of(args)
        verdict = state.gate.verdict(self, device.index if device.type == "cuda" else None)
        if verdict.path == "reference":
            return self.fall_back(args, verdict.reason or "", verdict.detail)
        try:
            out = state.admitted(self.name, args)
        except RuntimeError:
            self._failed(*args)
            raise
        if out is NotImplemented:
            return self.fall_back(args, unsupported(state.why()))
        if self.mutates:
            torch.autograd.graph.increment_version(args[self.arguments.index(name)] for name in self.mutates)
        return out

    def _failed(self, *args: Any) -> None:
        """A native call raised. Where it was CUDA that failed, the op is closed on that device by now: count it."""
        device = self.device_of(args)
        text = state.gate.host.failure(self.name, device.index) if device.type == "cuda" else None
        if text:
            state.telemetry.failed(self.name, str(device), Reason.RUNTIME_ERROR, f"{text}; restart the process")

    def fall_back(self, args: Sequence[Any], reason: str, detail: str = "") -> Any:
        self.validate(args)  # a wrong call is an error, not a fallback
        self.count_fallback(args, reason, detail)
        with without_autocast(self.device_of(args)):
            return self._call(self.reference, args)

    def validate(self, args: Sequence[Any]) -> None:
        """ValueError or TypeError for a wrong call."""
        self._call(self._checks, args)

    def count_fallback(self, args: Sequence[Any], reason: str, detail: str) -> None:
        state.count_fallback(self.name, str(self.device_of(args)), reason, detail)

    def unmet_need(self, args: Sequence[Any]) -> Need | None:
        """The first declared need that this right call does not meet. Pure: reads no flag and no environment."""
        named = dict(zip(self.arguments, args, strict=True))
        return next((need for need in self.needs if not need.holds(named)), None)

    # ---- qualification --------------------------------------------------------------------------------------------

    def compare_paths(self, sample: Sample) -> Mismatch | str | None:
        """Both paths on one sample: the worst breach of the contract, the need that refused it, or None."""
        args = self.bind(sample.args, sample.kwargs)
        got = self.outcome(lambda every: state.admitted(self.name, every, trial=True), args)
        if got is NotImplemented:
            return unsupported(state.why())
        return self.contract.compare(got, self.outcome(lambda every: self._call(self.reference, every), args))

    def outcome(self, call: Callable[[Sequence[Any]], Any], args: Sequence[Any]) -> Any:
        """What `call(args)` answers; of an op that writes into arguments, these as it leaves them. `args` stay."""
        if not self.mutates:
            return call(args)
        places = [self.arguments.index(name) for name in self.mutates]
        every = list(args)
        for place, copy in zip(places, _copies([args[place] for place in places]), strict=True):
            every[place] = copy
        out = call(every)
        return out if out is NotImplemented else tuple(every[place] for place in places)

    def quick_case(self, device: int) -> str | None:
        """The first sample on both paths, on a side stream; the comparator's sentence, or None."""
        from .runtime.qualify import TorchRunner

        runner = TorchRunner(state.preload)
        with runner.scope(device):
            sample = next(iter(self.samples(runner.target(device))))
            found = self.compare_paths(sample)
            runner.finish(device)
        return None if found is None else f"{sample.name}: {found}"


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """With the same strides and offsets; what shared memory shares memory."""
    storages: dict[int, Any] = {}
    copies = []
    for x in tensors:
        memory = x.untyped_storage()
        copy = storages.setdefault(memory.data_ptr(), memory.clone())
        made = torch.empty(0, dtype=x.dtype, device=x.device)
        copies.append(made.set_(copy, x.storage_offset(), x.shape, x.stride()))
    return copies


def _spread(grad: Tensor) -> Tensor:
    """A gradient that is one value in many places, as that of a sum is, as values: a kernel walks rows."""
    if any(stride == 0 and size > 1 for stride, size in zip(grad.stride(), grad.shape, strict=True)):
        return grad.contiguous()
    return grad


def _pairs(args: Sequence[Any], in_dims: Sequence[int | None]) -> Iterable[tuple[Any, int | None]]:
    return zip(args, in_dims, strict=True)


def is_transformed(args: Iterable[Any]) -> bool:
    """Under torch.func's grad or jvp, or with a forward-mode tangent.

    A custom op of torch's has no rule for these: it raises, or drops the tangent without a word. The reference is plain
    torch and has them all.
    """
    stack = torch._C._functorch.get_interpreter_stack() or ()
    if any(level.key() in _DIFFERENTIATES for level in stack):
        return True
    if torch.autograd.forward_ad._current_level < 0:
        return False
    unpack = torch.autograd.forward_ad.unpack_dual
    return any(isinstance(x, Tensor) and x.is_floating_point() and unpack(x).tangent is not None for x in args)


def needs_dispatcher(args: Iterable[Any]) -> bool:
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return any(
        isinstance(x, Tensor) and (type(x) not in (Tensor, torch.nn.Parameter) or x.device.type not in ("cpu", "cuda"))
        for x in args
    )


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels are of their arguments' dtypes and know of no autocast: what answers in their place must not either."""
    kind = device.type
    if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def out_of_autocast(wide: torch.dtype, device: torch.device) -> torch.dtype:
    """For formulas that torch.func differentiates: what it runs behind them is out of reach of `without_autocast`, and
    autocast leaves float64 alone."""
    kind = device.type
    return torch.float64 if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind) else wide


def find(name: str | OpFunction) -> Op:
    """The op of this name, or of this public function; UnknownOpError with near matches where there is none."""
    found = getattr(name, "op", None)
    if isinstance(found, Op):
        return found
    if not isinstance(name, str):
        raise TypeError(f"op: expected the name of an op, got {type(name).__name__}")
    if name not in OPS:
        raise UnknownOpError("op", name, OPS)
    return OPS[name]
