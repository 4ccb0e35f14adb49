"""What a forward computes, read from its source, and the same forward with one step of it replaced.

Class names say too little: a family keeps its names from one release of transformers to the next and changes its code.
So a norm is known by its arithmetic, and of every other forward only the statements that an op stands for are replaced;
its signature, its decorators and all else stay as that release has them. What does not match exactly is left.
"""

from __future__ import annotations
import __future__

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Function = Callable[..., Any]
ROTARY = "apply_rotary_pos_emb"


# By the function, not by its class, whose forward may be exchanged. Reading one takes milliseconds, and a model has
# hundreds of modules of a few classes.
remembered = functools.lru_cache(maxsize=256)


class Unrecognised(Exception):
    """Not of a form that is known; the text is the reason, as a report says it."""


# ---- reading ---------------------------------------------------------------------------------------------------------


def innermost(function: Function) -> Function:
    """Without what decorators put around it: they say who may call it and when, not what it computes."""
    return inspect.unwrap(function)


def parsed(function: Function) -> ast.FunctionDef:
    """A tree of its own for every call: the caller may change it."""
    if not inspect.isfunction(function):
        raise Unrecognised("its forward is no plain Python function")
    try:
        source = textwrap.dedent(inspect.getsource(function))
        node = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        raise Unrecognised("the source of its forward cannot be read") from None
    if not isinstance(node, ast.FunctionDef) or node.name != function.__name__:
        raise Unrecognised("the source of its forward cannot be read")
    return node


def canonical(node: ast.FunctionDef) -> str:
    """The statements alone, with parameters and local names numbered in the order in which they appear."""
    body = node.body
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]  # the docstring
    local = {argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
    local |= {name.id for name in _all(body, ast.Name) if isinstance(name.ctx, ast.Store)}
    numbers: dict[str, str] = {}

    class Numbered(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.Name:
            if name.id not in local:
                return name
            return ast.Name(numbers.setdefault(name.id, f"name{len(numbers)}"), name.ctx)

    # a tree of its own: the transformer changes in place
    copied = ast.parse("\n".join(ast.unparse(statement) for statement in body)).body
    return "\n".join(ast.dump(Numbered().visit(statement)) for statement in copied)


def _all(nodes: list[ast.stmt], kind: type[Any]) -> Iterator[Any]:
    return (found for node in nodes for found in ast.walk(node) if isinstance(found, kind))


def _form(source: str) -> str:
    node = ast.parse(textwrap.dedent(source)).body[0]
    assert isinstance(node, ast.FunctionDef)
    return canonical(node)


# ---- norms -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NormForm:
    """Which RMS norm a module computes."""

    eps: str  # the name of its attribute
    offset: float  # what is added to the weight
    rounds_once: bool  # to x's dtype whatever the weight's, as the op does; else before the product with the weight too


# y = weight · round(x / rms): rounded to x's dtype before the product, which torch promotes
LLAMA_NORM = """
def forward(self, x):
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + self.{eps})
    return self.weight * x.to(dtype)
"""
# y = round((1 + weight) · x / rms)
GEMMA_NORM = """
def forward(self, x):
    y = self._norm(x.float())
    y = y * (1.0 + self.weight.float())
    return y.type_as(x)
"""
GEMMA_NORM_PART = """
def _norm(self, x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
"""
_LLAMA_FORMS = {_form(LLAMA_NORM.format(eps=eps)): eps for eps in ("variance_epsilon", "eps")}
_GEMMA_FORM, _GEMMA_PART = _form(GEMMA_NORM), _form(GEMMA_NORM_PART)


def norm_form(cls: type) -> NormForm:
    """The form of a norm's class.

    Raises:
        Unrecognised: its forward is another one.
    """
    if inspect.getattr_static(cls, "__call__", None) is not torch.nn.Module.__call__:
        raise Unrecognised("it has a __call__ of its own, which a fused op would pass by")
    function = innermost(_forward_of(cls))
    return _norm_form(function, innermost(getattr(cls, "_norm", function)))


@remembered
def _norm_form(function: Any, part: Function) -> NormForm:
    found = canonical(parsed(function))
    if function.__globals__.get("torch", torch) is torch:
        if found in _LLAMA_FORMS:
            return NormForm(_LLAMA_FORMS[found], 0.0, rounds_once=False)
        if found == _GEMMA_FORM and canonical(parsed(part)) == _GEMMA_PART:
            return NormForm("eps", 1.0, rounds_once=True)
    raise Unrecognised("its forward is no RMS norm of a form that is known")


def _forward_of(cls: type) -> Function:
    function = getattr(cls, "forward", None)
    if function is None:
        raise Unrecognised("it has no forward")
    return function


# ---- the rotation ----------------------------------------------------------------------------------------------------

ROTATION = """
def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_out = (q * cos) + (rotate_half(q) * sin)
    k_out = (k * cos) + (rotate_half(k) * sin)
    return q_out, k_out
"""
ROTATE_HALF = """
def rotate_half(x):
    first = x[..., : x.shape[-1] // 2]
    second = x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)
"""
_ROTATION, _ROTATE_HALF = _form(ROTATION), _form(ROTATE_HALF)


def check_rotation(function: Any) -> None:
    """That this `apply_rotary_pos_emb` turns halves against each other over all of the last dimension.

    Raises:
        Unrecognised: it does something else, a partial or an interleaved rotation for example.
    """
    try:
        inner: Any = innermost(function)
        if _is_rotation(inner, innermost(inner.__globals__["rotate_half"])):
            return
    except (Unrecognised, AttributeError, KeyError, TypeError, ValueError):
        pass
    raise Unrecognised(f"its {ROTARY} is no rotation of a form that is known")


@remembered
def _is_rotation(function: Function, half: Function) -> bool:
    # the statements do not say which place is whose, nor which dimension is meant where none is given
    parameters = inspect.signature(function).parameters
    dimension = parameters.get("unsqueeze_dim")
    return (
        tuple(parameters)[:4] == ("q", "k", "cos", "sin")
        and dimension is not None
        and dimension.default == 1
        and canonical(parsed(function)) == _ROTATION
        and canonical(parsed(half)) == _ROTATE_HALF
    )


# ---- steps of a forward ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Steps:
    """Steps of a forward that an op may stand for, by the names of the attributes of self that they use."""

    add_norms: tuple[str, ...] = ()  # norms that directly follow a residual add
    gated: tuple[str, str, str] | None = None  # activation, gate projection, up projection
    rotates: bool = False  # calls apply_rotary_pos_emb
    head_loss: str | None = None  # the attribute of the head, whose logits the loss is of

    def __bool__(self) -> bool:
        return bool(self.add_norms or self.gated or self.rotates or self.head_loss)

    def __le__(self, other: Steps) -> bool:
        """Whether the other has all of these."""
        return (
            set(self.add_norms) <= set(other.add_norms)
            and self.gated in (None, other.gated)
            and self.rotates <= other.rotates
            and self.head_loss in (None, other.head_loss)
        )


def steps_of(cls: type) -> Steps:
    """What is in this class's forward.

    Raises:
        Unrecognised: it cannot be read, or not be compiled again outside of its class.
    """
    return _steps_of(innermost(_forward_of(cls)))


@remembered
def _steps_of(function: Function) -> Steps:
    return _replace(_rewritable(function), Steps())


def lone_adds(cls: type) -> int:
    """Residual adds that no norm of the same forward directly follows."""
    return _lone_adds(innermost(_forward_of(cls)))


@remembered
def _lone_adds(function: Function) -> int:
    node = parsed(function)
    adds = [
        add
        for add in _all(node.body, ast.Assign)
        if isinstance(add.value, ast.BinOp)
        and isinstance(add.value.op, ast.Add)
        and isinstance(add.value.left, ast.Name)
        and isinstance(add.value.right, ast.Name)
    ]
    return len(adds) - len(_replace(node, Steps()).add_norms)


def _rewritable(function: Function) -> ast.FunctionDef:
    node = parsed(function)
    if function.__code__.co_freevars:
        raise Unrecognised("its forward is a closure, or uses super()")
    if not node.args.args or node.args.args[0].arg != "self":
        raise Unrecognised("its forward does not begin with self")
    for name in ast.walk(node):
        text = name.attr if isinstance(name, ast.Attribute) else name.id if isinstance(name, ast.Name) else ""
        if text.startswith("__") and not text.endswith("__"):
            raise Unrecognised("its forward uses a name that is private to its class")
    return node


def rewritten(cls: type, steps: Steps, helpers: Mapping[str, Any]) -> Function:
    """The class's forward with these steps replaced by calls of the helpers, decorated as before.

    Args:
        helpers: what the new names stand for: `prequal_add_norm_<name>`, `prequal_gated`, `prequal_rotary`.

    Raises:
        Unrecognised: the steps are not there, or the new forward cannot be made.
    """
    function = innermost(_forward_of(cls))
    node = _rewritable(function)
    if not steps <= _replace(node, steps):
        raise Unrecognised("its forward has changed")
    # Line numbers of the original file: a traceback shows the statement that was there.
    ast.increment_lineno(node, function.__code__.co_firstlineno - 1)
    # The helpers come in as cells of a closure. The globals must stay the module's own: who changes a name there later,
    # other than a helper's, means this forward too, torch.compile looks names up by the module's name, and nobody
    # else's module is touched.
    maker = ast.parse(f"def make({', '.join(helpers)}):\n    pass\n    return {node.name}")
    outer = maker.body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body[0] = node
    flags = function.__code__.co_flags & __future__.annotations.compiler_flag
    made: dict[str, Any] = {}
    try:
        code = compile(ast.fix_missing_locations(maker), function.__code__.co_filename, "exec", flags, True)
        exec(code, function.__globals__, made)  # type: ignore[attr-defined]
        forward = made["make"](**helpers)
    except Exception as error:  # decorators and defaults are evaluated again, and anything may be in them
        raise Unrecognised(f"its forward cannot be made again ({type(error).__name__}: {error})") from error
    for level in {id(forward): forward, id(innermost(forward)): innermost(forward)}.values():
        level.__qualname__ = function.__qualname__
    return forward


def _replace(node: ast.FunctionDef, wanted: Steps) -> Steps:
    """All steps that the tree has; the wanted ones are replaced in it."""
    add_norms: list[str] = []
    for parent in ast.walk(node):
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(parent, name, None)
            if isinstance(statements, list):
                add_norms += _replace_add_norms(statements, wanted.add_norms)
    head = _replace_head_loss(node.body, wanted.head_loss)
    products = _Products(wanted.gated)
    products.visit(node)
    rotations = [name for name in _all(node.body, ast.Name) if name.id == ROTARY]
    rotates = bool(rotations) and all(isinstance(name.ctx, ast.Load) for name in rotations)
    if rotates and wanted.rotates:
        for name in rotations:
            name.id = "prequal_rotary"
    return Steps(tuple(add_norms), products.found[0] if len(products.found) == 1 else None, rotates, head)


def _replace_add_norms(statements: list[ast.stmt], wanted: tuple[str, ...]) -> list[str]:
    """`a = r + a; r = a; a = self.norm(a)`, three statements in a row, in this order or with the summands exchanged.

    One call then makes both values that live on: the normalised `a` and the sum `r`.
    """
    found, i = [], 0
    while i + 2 < len(statements):
        matched = _add_norm(*statements[i : i + 3])
        if matched is not None:
            total, residual, norm = matched
            found.append(norm)
            if norm in wanted:
                text = f"{total}, {residual} = prequal_add_norm_{norm}(self.{norm}, {total}, {residual})"
                (made,) = ast.parse(text).body
                for part in ast.walk(made):
                    ast.copy_location(part, statements[i + 2])
                statements[i : i + 3] = [made]
        i += 1
    return found


def _add_norm(add: ast.stmt, keep: ast.stmt, norm: ast.stmt) -> tuple[str, str, str] | None:
    match add, keep, norm:
        case (
            ast.Assign(
                targets=[ast.Name(id=total)],
                value=ast.BinOp(left=ast.Name(id=left), op=ast.Add(), right=ast.Name(id=right)),
            ),
            ast.Assign(targets=[ast.Name(id=residual)], value=ast.Name(id=kept)),
            ast.Assign(
                targets=[ast.Name(id=target)],
                value=ast.Call(
                    func=ast.Attribute(value=ast.Name(id="self"), attr=attribute),
                    args=[ast.Name(id=argument)],
                    keywords=[],
                ),
            ),
        ) if residual != total and {left, right} == {total, residual} and kept == target == argument == total:
            return total, residual, attribute
    return None


# The capping of logits that may stand between the head and the loss
CAPPING = """
if self.config.final_logit_softcapping is not None:
    logits = logits / self.config.final_logit_softcapping
    logits = torch.tanh(logits)
    logits = logits * self.config.final_logit_softcapping
"""
_CAPPING = ast.dump(ast.parse(CAPPING).body[0])


def _replace_head_loss(statements: list[ast.stmt], wanted: str | None) -> str | None:
    """`logits = self.head(e)`, perhaps capped, `loss = None`, `if labels is not None: loss = self.loss_function(...)`.

    Before them comes a call that may give the loss; they stay as they are for where it gives none.
    """
    for i in range(len(statements)):
        match statements[i]:
            case ast.Assign(
                targets=[ast.Name(id="logits")],
                value=ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=head), args=[hidden], keywords=[]),
            ):
                break
    else:
        return None
    end = i + 1
    is_capped = end < len(statements) and ast.dump(statements[end]) == _CAPPING
    end += is_capped
    if end + 1 >= len(statements) or ast.unparse(statements[end]) != "loss = None":
        return None
    match statements[end + 1]:
        case ast.If(
            test=ast.Compare(left=ast.Name(id="labels"), ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]),
            body=[
                ast.Assign(
                    targets=[ast.Name(id="loss")],
                    value=ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr="loss_function")) as call,
                )
            ],
            orelse=[],
        ) if _is_loss_of_logits(call):
            if wanted == head:
                more = next((ast.unparse(k.value) for k in call.keywords if k.arg is None), "{}")
                text = (
                    f"loss = prequal_head_loss(self, self.{head}, {ast.unparse(hidden)}, labels, {more}, {is_capped})\n"
                    "logits = None\nif loss is None:\n    pass"
                )
                made = ast.parse(text).body
                for part in (part for new in made for part in ast.walk(new)):
                    ast.copy_location(part, statements[i])
                assert isinstance(made[-1], ast.If)
                made[-1].body = statements[i : end + 2]
                statements[i : end + 2] = made
            return head
    return None


def _is_loss_of_logits(call: ast.Call) -> bool:
    """`self.loss_function(logits, labels, vocab_size, **kwargs)`, by position or by name."""
    names = ["logits", "labels", "vocab_size"]
    given = dict(zip(names, call.args, strict=False)) | {k.arg: k.value for k in call.keywords if k.arg is not None}
    sizes = ("self.config.vocab_size", "self.vocab_size")
    return (
        set(given) == set(names)
        and [ast.unparse(given[name]) for name in names[:2]] == names[:2]
        and ast.unparse(given["vocab_size"]) in sizes
    )


CAUSAL_LOSS = """
def loss(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **kwargs):
    logits = logits.float()
    if shift_labels is None:
        labels = nn.functional.pad(labels, (0, 1), value=ignore_index)
        shift_labels = labels[..., 1:].contiguous()
    logits = logits.view(-1, vocab_size)
    shift_labels = shift_labels.view(-1)
    shift_labels = shift_labels.to(logits.device)
    loss = fixed_cross_entropy(logits, shift_labels, num_items_in_batch, ignore_index, **kwargs)
    return loss
"""
FIXED_CROSS_ENTROPY = """
def fixed_cross_entropy(source, target, num_items_in_batch=None, ignore_index=-100, **kwargs):
    reduction = "sum" if num_items_in_batch is not None else "mean"
    loss = nn.functional.cross_entropy(source, target, ignore_index=ignore_index, reduction=reduction)
    if reduction == "sum":
        if torch.is_tensor(num_items_in_batch):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        loss = loss / num_items_in_batch
    return loss
"""
_CAUSAL_LOSS, _FIXED_CROSS_ENTROPY = _form(CAUSAL_LOSS), _form(FIXED_CROSS_ENTROPY)


def is_causal_loss(function: Any) -> bool:
    """Whether it is the mean, or the sum over a number of items, of the cross-entropy of shifted labels."""
    try:
        return _is_causal_loss(function)
    except (Unrecognised, TypeError):
        return False


@remembered
def _is_causal_loss(function: Any) -> bool:
    inner: Any = getattr(function, "__globals__", {}).get("fixed_cross_entropy")
    return (
        _signature(function) == ("logits", "labels", "vocab_size", -100)
        and _signature(inner) == ("source", "target", "num_items_in_batch", -100)
        and canonical(parsed(function)) == _CAUSAL_LOSS
        and canonical(parsed(inner)) == _FIXED_CROSS_ENTROPY
    )


def _signature(function: Function) -> tuple[Any, ...]:
    """What the statements do not say: whose the first three places are, and which label is left out by default."""
    parameters = inspect.signature(function).parameters
    ignored = parameters.get("ignore_index")
    return (*list(parameters)[:3], None if ignored is None else ignored.default)


class _Products(ast.NodeTransformer):
    """`self.activation(self.gate(e)) * self.up(e)`, with one and the same expression e."""

    def __init__(self, wanted: tuple[str, str, str] | None) -> None:
        self.wanted = wanted
        self.found: list[tuple[str, str, str]] = []

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.BinOp(
                left=ast.Call(
                    func=ast.Attribute(value=ast.Name(id="self"), attr=activation),
                    args=[
                        ast.Call(
                            func=ast.Attribute(value=ast.Name(id="self"), attr=gate),
                            args=[ast.Name() as x],
                            keywords=[],
                        )
                    ],
                    keywords=[],
                ),
                op=ast.Mult(),
                right=ast.Call(
                    func=ast.Attribute(value=ast.Name(id="self"), attr=up), args=[ast.Name() as same], keywords=[]
                ),
            ) if same.id == x.id:
                self.found.append((activation, gate, up))
                if self.wanted == (activation, gate, up):
                    text = f"prequal_gated(self.{activation}, self.{gate}, self.{gate}({x.id}), self.{up}({x.id}))"
                    made = ast.parse(text, mode="eval").body
                    for part in ast.walk(made):
                        ast.copy_location(part, node)
                    return made
        return node
