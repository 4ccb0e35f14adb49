"""One op, declared once: the PyTorch reference is the schema, the fake, the fallback, the oracle and the documentation.

`@op(...)` on the reference makes the public function. In plain eager it calls the native launcher straight; under
torch.compile, autograd, functorch, a TorchDispatchMode or with a tensor subclass it goes through torch.ops.prequal.
Whatever the native side does not answer is answered by the reference, counted, with its reason.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from . import runtime_state as state
from .constraints import Need
from .contracts import Contract, Mismatch
from .errors import FallbackError, UnknownOpError
from .runtime.reasons import Reason, unsupported

NAMESPACE = "prequal"
_DIFFERENTIATES = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
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

    def backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Declare the gradient, `function(saved_arguments, outputs, *grads) -> {argument: grad}`."""
        ...

    def bad_calls(self, function: Callable[[torch.device], Iterable[BadCall]]) -> Any:
        """Declare wrong calls for the tests."""
        ...

    def cost(self, function: Callable[..., Cost]) -> Callable[..., Cost]:
        """Declare the bytes and FLOPs of a call, from its arguments alone: what benchmarks hold times against."""
        ...

    def kernel(self, *, needs: Sequence[Need] = ()) -> None:
        """Declare that src/ops has a launcher of this name, and what it needs of a right call."""
        ...


def op(
    *, samples: Callable[[torch.device], Iterable[Sample]], contract: Contract
) -> Callable[[Callable[..., Any]], OpFunction]:
    """Declare an op. The first sample is the quick case: small, and run at first use where no evidence covers a GPU."""

    def declare(reference: Callable[..., Any]) -> OpFunction:
        return Op(reference, samples, contract).function

    return declare


class Op:
    """An op and everything that is said about it."""

    def __init__(
        self,
        reference: Callable[..., Any],
        samples: Callable[[torch.device], Iterable[Sample]],
        contract: Contract,
    ) -> None:
        self.reference = reference
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
        self._fake: Callable[..., Any] = reference
        self._backward: Callable[..., Any] | None = None
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

    def backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        self._backward = function
        return function

    def bad_calls(self, function: Callable[[torch.device], Iterable[BadCall]]) -> Any:
        self._bad_calls = function
        return function

    def cost(self, function: Callable[..., Cost]) -> Callable[..., Cost]:
        self._cost = function
        return function

    def kernel(self, *, needs: Sequence[Need] = ()) -> None:
        self.has_kernel = True
        self.needs = tuple(needs)
        state.native_ops[self.name] = self
        self._globals["native"] = state.native_function(self.name)

    def wrong_calls(self, device: torch.device) -> list[BadCall]:
        return list(self._bad_calls(device))

    def cost_of(self, args: Sequence[Any]) -> Cost | None:
        """The declared cost of this right call; None where the op declares none."""
        return None if self._cost is None else self._call(self._cost, args)

    # ---- torch.library --------------------------------------------------------------------------------------------

    def _register(self) -> None:
        self.schema = torch.library.infer_schema(self.reference, mutates_args=()).replace("*, ", "")
        qualified = f"{NAMESPACE}::{self.name}"
        LIBRARY.define(f"{self.name}{self.schema}")
        LIBRARY.impl(self.name, self._dispatched, "CompositeExplicitAutograd")
        torch.library.register_fake(qualified, self._traced, lib=LIBRARY)
        torch.library.register_autograd(qualified, self._vjp, setup_context=self._save, lib=LIBRARY)
        torch.library.register_vmap(qualified, self._vmapped, lib=LIBRARY)
        self.packet = getattr(getattr(torch.ops, NAMESPACE), self.name)

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
        """Bound arguments as a caller passes them: by position, and the keyword-only ones by name. Without `defaults`,
        keyword-only ones that are None by default and by value are left out."""
        positional, named = [], {}
        for value, (name, parameter) in zip(args, self.signature.parameters.items(), strict=True):
            if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
                positional.append(value)
            elif defaults or value is not None or parameter.default is not None:
                named[name] = value
        return positional, named

    def _dispatched(self, *args: Any, **kwargs: Any) -> Any:
        # The dispatcher drops trailing defaults. inspect's bind costs 10 us a call, as much as a whole op.
        if kwargs:
            return self.answer(self.bind(args, kwargs))
        return self.answer(args + self._defaults[len(args) :])

    def _traced(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.bind(args, kwargs)
        self.validate(bound)
        return self._call(self._fake, bound)

    def _vmapped(self, info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
        """Under torch.vmap: one call an element, each by the fast path where it can, then stacked."""

        def element(i: int) -> Any:
            return self.packet(*(x if dim is None else x.select(dim, i) for x, dim in _pairs(args, in_dims)))

        if info.batch_size == 0:  # what one element would give says the shape
            one = [
                x if d is None else x.new_zeros([n for i, n in enumerate(x.shape) if i != d])
                for x, d in _pairs(args, in_dims)
            ]
            outputs = self.packet(*one)
            if isinstance(outputs, Tensor):
                return outputs.new_empty((0, *outputs.shape)), 0
            return tuple(x.new_empty((0, *x.shape)) for x in outputs), tuple(0 for _ in outputs)
        each = [element(i) for i in range(info.batch_size)]
        if isinstance(each[0], Tensor):
            return torch.stack(each), 0
        return tuple(torch.stack(column) for column in zip(*each, strict=True)), tuple(0 for _ in each[0])

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        outputs = (output,) if isinstance(output, Tensor) else tuple(output)
        ctx.places = [i for i, value in enumerate(inputs) if isinstance(value, Tensor)]
        ctx.others = [None if isinstance(value, Tensor) else value for value in inputs]
        # integer outputs (indices) are what a gradient formula needs; the values can be made again
        kept = [value for value in outputs if not value.is_floating_point()] if self._backward else []
        ctx.mark_non_differentiable(*(value for value in outputs if not value.is_floating_point()))
        ctx.save_for_backward(*(inputs[i] for i in ctx.places), *kept)

    def _vjp(self, ctx: Any, *grads: Any) -> Any:
        """Gradients of the floating tensor arguments: the declared formula, or the reference differentiated again."""
        saved = ctx.saved_tensors
        tensors, kept = saved[: len(ctx.places)], saved[len(ctx.places) :]
        values = list(ctx.others)
        for place, tensor in zip(ctx.places, tensors, strict=True):
            values[place] = tensor
        wanted = [i for i in ctx.places if ctx.needs_input_grad[i] and values[i].is_floating_point()]
        result: list[Tensor | None] = [None] * len(values)

        if self._backward is not None:
            named = dict(zip(self.arguments, values, strict=True))
            found = self._backward(named, kept, *grads)
            for i in wanted:
                result[i] = found.get(self.arguments[i])
            return tuple(result)

        def reference(*primals: Tensor) -> Any:
            args = list(values)
            for i, primal in zip(wanted, primals, strict=True):
                args[i] = primal
            return self._call(self.reference, args)

        pull_back = torch.func.vjp(reference, *(values[i] for i in wanted))[1]
        for i, grad in zip(wanted, pull_back(grads[0] if len(grads) == 1 else grads), strict=True):
            result[i] = grad
        return tuple(result)

    # ---- the public function --------------------------------------------------------------------------------------

    def _make_function(self) -> OpFunction:
        """A function with the reference's own signature: no *args to bind, nothing for torch.compile to guess."""
        declared, passed, in_order = [], [], []
        # torch.compile looks globals up by importing the module of that name: the function needs one of its own.
        home = types.ModuleType(f"prequal._calls.{self.name}")
        sys.modules[home.__name__] = home
        self._globals: dict[str, Any] = home.__dict__
        self._globals |= {
            "is_tracing": torch.compiler.is_dynamo_compiling,  # other tracers are dispatch modes
            "packet": self.packet,
            "native": state.absent,
            "elsewhere": self._elsewhere,
            "failed": self._failed,
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
        source = (
            f"def {self.name}({', '.join(declared)}):\n"
            f"    if is_tracing():\n"
            f"        return packet({', '.join(passed)})\n"
            f"    try:\n"
            f"        out = native({', '.join(in_order)})\n"
            f"    except RuntimeError:\n"
            f"        failed({', '.join(in_order)})\n"
            f"        raise\n"
            f"    if out is NotImplemented:\n"
            f"        return elsewhere({', '.join(in_order)})\n"
            f"    return out\n"
        )
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
        if why in _OTHER_ROADS and _is_transformed(args):
            return self.fall_back(args, unsupported("transform"))
        if why in _OTHER_ROADS and _needs_dispatcher(args):
            return self._call(self.packet, args)
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
        return self._call(self.reference, args)

    def validate(self, args: Sequence[Any]) -> None:
        """ValueError or TypeError for a wrong call."""
        self._call(self._checks, args)

    def count_fallback(self, args: Sequence[Any], reason: str, detail: str) -> None:
        device = str(self.device_of(args))
        state.telemetry.fell_back(self.name, device, reason, detail)
        if state.flags.is_strict:
            raise FallbackError(self.name, device, reason, detail)

    def unmet_need(self, args: Sequence[Any]) -> Need | None:
        """The first declared need that this right call does not meet. Pure: reads no flag and no environment."""
        named = dict(zip(self.arguments, args, strict=True))
        return next((need for need in self.needs if not need.holds(named)), None)

    # ---- qualification --------------------------------------------------------------------------------------------

    def compare_paths(self, sample: Sample) -> Mismatch | str | None:
        """Both paths on one sample: the worst breach of the contract, the need that refused it, or None."""
        args = self.bind(sample.args, sample.kwargs)
        got = state.admitted(self.name, args, trial=True)
        if got is NotImplemented:
            return unsupported(state.why())
        return self.contract.compare(got, self._call(self.reference, args))

    def quick_case(self, device: int) -> str | None:
        """The first sample on both paths, on a side stream; the comparator's sentence, or None."""
        from .runtime.qualify import TorchRunner

        runner = TorchRunner(state.preload)
        with runner.scope(device):
            sample = next(iter(self.samples(runner.target(device))))
            found = self.compare_paths(sample)
            runner.finish(device)
        return None if found is None else f"{sample.name}: {found}"


def _pairs(args: Sequence[Any], in_dims: Sequence[int | None]) -> Iterable[tuple[Any, int | None]]:
    return zip(args, in_dims, strict=True)


def _is_transformed(args: Iterable[Any]) -> bool:
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


def _needs_dispatcher(args: Iterable[Any]) -> bool:
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    grad = torch.is_grad_enabled()
    return any(
        isinstance(x, Tensor)
        and (
            type(x) not in (Tensor, torch.nn.Parameter)
            or (grad and x.requires_grad)
            or x.device.type not in ("cpu", "cuda")
        )
        for x in args
    )


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
