"""Is a solution ours, copied? Compared as syntax, without comments, docstrings, annotations and layout.

Short functions are alike whoever writes them, so only a definition of some length counts: many nodes, all the same.
"""

import ast
import importlib.util
from collections.abc import Mapping
from pathlib import Path

ENOUGH = 90  # syntax nodes; about eight lines of code


def copied_from_ours(student: str, ours: Mapping[str, str]) -> str | None:
    """The name of a definition of ours ("module:name" or "module:Class.method") that stands in the source `student`.

    None if none does.
    """
    theirs = {shape for shape in map(_shape, _definitions(student)) if shape is not None}
    for target in ours.values():
        module, name = target.split(":")
        path = importlib.util.find_spec(module).origin
        source = Path(path).read_text(encoding="utf-8")
        nodes = ast.parse(source).body
        for part in name.split("."):
            [node] = [node for node in nodes if getattr(node, "name", None) == part]
            nodes = node.body
        if any(_shape(part) in theirs for part in _with_methods(node)):
            return name
    return None


def _definitions(source: str) -> list[ast.AST]:
    return [part for node in ast.parse(source).body for part in _with_methods(node)]


def _with_methods(node: ast.AST) -> list[ast.AST]:
    return [n for n in ast.walk(node) if isinstance(n, ast.FunctionDef | ast.ClassDef)]


def _shape(node: ast.AST) -> str | None:
    """The body of a definition as text; None if it is too short to say anything."""
    node = _Bare().visit(ast.parse(ast.unparse(node)).body[0])
    if sum(1 for _ in ast.walk(node)) < ENOUGH:
        return None
    return "\n".join(ast.dump(statement) for statement in node.body)


class _Bare(ast.NodeTransformer):
    """Takes docstrings and annotations away."""

    def visit_FunctionDef(self, node):
        self.generic_visit(node)
        node.returns, node.body = None, _without_docstring(node.body)
        return node

    def visit_ClassDef(self, node):
        self.generic_visit(node)
        node.body = _without_docstring(node.body)
        return node

    def visit_arg(self, node):
        node.annotation = None
        return node

    def visit_AnnAssign(self, node):
        self.generic_visit(node)
        return ast.Assign([node.target], node.value, lineno=node.lineno) if node.value else ast.Pass()


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    match body:
        case [ast.Expr(ast.Constant(str())), _, *_]:
            return body[1:]
    return body
