"""Nodes from a line of text: right for the number of ranks, or refused with what would be right."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdl.topology import group_by, parse_nodes


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("4", ((0, 1, 2, 3),)),
        ("3+1", ((0, 1, 2), (3,))),
        ("2+1+1", ((0, 1), (2,), (3,))),
        (" 1 + 3 ", ((0,), (1, 2, 3))),
        ("0,1,0,1", ((0, 2), (1, 3))),
        ("7, 7, 3, 7", ((0, 1, 3), (2,))),
        ("0,0,0,0", ((0, 1, 2, 3),)),
    ],
)
def test_sizes_are_of_consecutive_ranks_and_numbers_are_the_node_of_each(
    text: str, nodes: tuple[tuple[int, ...], ...]
) -> None:
    assert parse_nodes(text, 4) == nodes


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_sizes_come_back_as_nodes_of_those_sizes(sizes: list[int]) -> None:
    nodes = parse_nodes("+".join(map(str, sizes)), sum(sizes))
    assert [len(node) for node in nodes] == sizes
    assert [rank for node in nodes for rank in node] == list(range(sum(sizes)))


@given(st.lists(st.integers(0, 4), min_size=2, max_size=12))
def test_ranks_share_a_node_exactly_if_their_labels_are_equal(labels: list[int]) -> None:
    nodes = parse_nodes(",".join(map(str, labels)), len(labels))
    assert nodes == group_by(labels)
    assert sorted(rank for node in nodes for rank in node) == list(range(len(labels)))
    assert [node[0] for node in nodes] == sorted(node[0] for node in nodes)
    assert all(list(node) == sorted(node) for node in nodes)
    assert len(nodes) == len({labels[rank] for node in nodes for rank in node})
    assert all(len({labels[rank] for rank in node}) == 1 for node in nodes)


def test_groups_take_any_labels() -> None:
    assert group_by(["b", "a", "b"]) == ((0, 2), (1,))
    assert group_by([]) == ()


@pytest.mark.parametrize(
    ("text", "size", "message"),
    [
        ("3+2", 4, r"'3\+2' has nodes of 5 ranks: for 4 ranks .* add up to 4, such as 2\+2, or 4 numbers"),
        ("3", 4, "nodes of 3 ranks"),
        ("4+0", 4, "has a node of no ranks"),
        ("0,1,0", 4, r"'0,1,0' gives the nodes of 3 ranks: for 4 ranks"),
        ("0,1,0,1,1", 4, "the nodes of 5 ranks"),
        ("2", 1, "for 1 ranks HPCDL_NODES must be sizes that add up to 1, such as 1, or"),
        *((text, 4, "is neither") for text in ("", "+", "2+", "2++2", "0,1,,1", "2+1,1", "a,b,a,b", "-1+5", "2x2")),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(text: str, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_nodes(text, size)
