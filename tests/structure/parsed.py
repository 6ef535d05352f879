"""Sources, parsed once for all the rules that read them."""

import ast
from functools import cache


@cache
def parsed(source: str) -> ast.Module:
    """Return the tree of a file, which nobody may change."""
    return ast.parse(source)


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """Return all nodes of a file."""
    return tuple(ast.walk(parsed(source)))
