"""What Slurm and sites say of a topology, read as they write it."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import UserError
from tools.nccl.topology import Topology, expand_hosts, parse_address, parse_scontrol, read_file

pytestmark = [pytest.mark.req("C10")]

TREE = """\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-2],n07
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=n[3-4]
SwitchName=leaf3 Level=0 LinkSpeed=1 Nodes=gpu5
SwitchName=cell1 Level=1 LinkSpeed=1 Nodes=n[1-4],n07 Switches=leaf[1-2]
SwitchName=cell2 Level=1 LinkSpeed=1 Nodes=gpu5 Switches=leaf3
SwitchName=root Level=2 LinkSpeed=1 Nodes=n[1-4],n07,gpu5 Switches=cell[1-2]
"""


def distance(topology: Topology, first: str, second: str) -> int:
    return int(topology.distance[topology.nodes.index(first), topology.nodes.index(second)])


def test_a_tree_gives_the_level_of_the_lowest_common_switch() -> None:
    found = parse_scontrol(TREE)
    assert sorted(found.nodes) == ["gpu5", "n07", "n1", "n2", "n3", "n4"]
    pairs = [("n1", "n1", 0), ("n1", "n07", 1), ("n2", "n3", 2), ("n4", "gpu5", 3), ("gpu5", "n4", 3)]
    assert [distance(found, one, other) for one, other, _ in pairs] == [away for _, _, away in pairs]
    assert found.groups() == {
        "n1": "leaf1",
        "n2": "leaf1",
        "n07": "leaf1",
        "n3": "leaf2",
        "n4": "leaf2",
        "gpu5": "leaf3",
    }
    assert len(set(found.groups(2).values())) == 2 and len(set(found.groups(3).values())) == 1
    part = found.of(["gpu5", "unknown", "n1"])
    assert part.nodes == ("gpu5", "n1") and part.distance.tolist() == [[0, 3], [3, 0]]
    assert part.groups() == {"gpu5": "leaf3", "n1": "leaf1"}


def test_the_oldest_form_ends_lines_with_a_space_and_trees_may_be_uneven() -> None:
    found = parse_scontrol(
        "SwitchName=s0 Level=1 LinkSpeed=1 Nodes=a,b,c Switches=s1 \n"
        "SwitchName=s1 Level=0 LinkSpeed=1 Nodes=a,b \n"
        "SwitchName=s2 Level=0 LinkSpeed=1 Nodes=c \n\n"
    )
    assert distance(found, "a", "b") == 1 and distance(found, "a", "c") == 3


def test_blocks_are_groups_and_aggregates_of_them_add_nothing() -> None:
    found = parse_scontrol(
        "BlockName=b1 BlockIndex=0 Nodes=n[01-02] BlockSize=2\n"
        "BlockName=b2 BlockIndex=1 Nodes=n[03-04] BlockSize=2\n"
        "AggregatedBlock=b[1-2] BlockIndex=2 Nodes=n[01-04] BlockSize=4\n"
    )
    assert found.groups() == {"n01": "b1", "n02": "b1", "n03": "b2", "n04": "b2"}
    assert distance(found, "n01", "n02") == 1 and distance(found, "n01", "n04") == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "tells of no nodes"),
        ("Partition=gpu Nodes=n1", "line 1 names neither a switch nor a block"),
        ("SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[1-", "line 1"),
        ("SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[1-x]", "no list of numbers"),
        (
            "SwitchName=a Level=1 LinkSpeed=1 Switches=b\nSwitchName=b Level=1 LinkSpeed=1 Switches=a\n"
            "SwitchName=l Level=0 LinkSpeed=1 Nodes=n1\nSwitchName=a Level=1 LinkSpeed=1 Switches=l",
            "above itself",
        ),
    ],
)
def test_what_slurm_would_not_print_is_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_scontrol(text)


def test_addresses_of_a_job() -> None:
    addresses = {"n1": "s0.s1.n1", "n2": "s0.s1.n2", "n3.site.eu": "s0.s2.n3.site.eu"}
    found = parse_address(addresses, dict.fromkeys(addresses, "switch.switch.node"))
    assert distance(found, "n1", "n2") == 1 and distance(found, "n1", "n3.site.eu") == 2
    assert found.groups()["n3.site.eu"] == "s2"
    uneven = parse_address(
        {"a": "x.y.z.a", "b": "s.b", "c": "s.c"},
        {"a": "switch.switch.switch.node", "b": "switch.node", "c": "switch.node"},
    )
    assert distance(uneven, "b", "c") == 1 and distance(uneven, "a", "b") == 4
    flat = parse_address({"a": "a", "b": "b"}, {"a": "node", "b": "node"})
    assert flat.distance.tolist() == [[0, 1], [1, 0]]
    with pytest.raises(UserError, match=r"SLURM_TOPOLOGY_ADDR=n1 of n1 does not fit its pattern switch.node"):
        parse_address({"n1": "n1"}, {"n1": "switch.node"})
    with pytest.raises(UserError, match="does not fit"):
        parse_address({"n1": "n1"}, {"n1": "switch"})
    with pytest.raises(UserError, match="no node tells"):
        parse_address({}, {})


@pytest.mark.parametrize(
    "text",
    [
        "node,a,b,c\na,0,1,3\nb,1,0,3\nc,3,3,0\n",
        "# 0 same node, 1 same L1 switch, 3 other cell\na b c\n0 1 3\n1 0 3\n3 3 0\n",
        "a;b;c\na;0;1;3\nb;1;0;3\nc;3;3;0",
        "a,b,1\nc, a, 3 # another cell\nb\tc\t3\n",
        "\ta\tb\tc\na\t0\t1\t3\nb\t1\t0\t3\nc\t3\t3\t0\n",
    ],
)
def test_a_published_matrix_in_the_forms_that_sites_use(text: str, tmp_path: Path) -> None:
    file = tmp_path / "distances.csv"
    file.write_text(text)
    found = read_file(file)
    assert sorted(found.nodes) == ["a", "b", "c"] and found.source == str(file)
    assert [distance(found, *pair) for pair in ("ab", "bc", "ca", "cc")] == [1, 3, 3, 0]
    assert found.groups() == {"a": "group of a", "b": "group of a", "c": "group of c"}


def test_a_file_may_hold_what_scontrol_prints(tmp_path: Path) -> None:
    file = tmp_path / "topology.conf"
    file.write_text("# made by hand\n" + TREE)
    assert read_file(file).groups() == parse_scontrol(TREE).groups()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# only a comment\n", "holds no distances"),
        ("0,1\n1,0\n", "line 1: the first line has to name the nodes"),
        ("a,b\n0,1\n", "names 2 nodes in line 1, but has 1 rows"),
        ("a,b\n0,1\n1\n", "line 3: 2 distances"),
        ("a,b\n0,x\n1,0\n", "line 2: 2 distances"),
        ("node,a,b\na,0,1\nc,1,0\n", "line 3 is of c, where b is the next"),
        ("a,a\n0,1\n1,0\n", "names a node twice"),
        ("a,b\n0,1\n2,0\n", "differs from the way back"),
        ("a,b\n1,1\n1,0\n", "from itself is not 0"),
        ("a b 1\na c\n", "line 2: a line of this file is NODE NODE DISTANCE"),
    ],
)
def test_errors_name_the_file_and_the_line(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "distances.txt"
    file.write_text(text)
    with pytest.raises(UserError, match=words) as error:
        read_file(file)
    assert str(file) in str(error.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be read \(No such file"):
        read_file(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"it is not text"):
        read_file(tmp_path / "binary")


@settings(deadline=None)
@given(st.text(alphabet="ab1,;[]-= \n\t#.SwitchNameBlockLevel=0Nodes", max_size=200))
def test_no_text_makes_it_fail_otherwise(text: str) -> None:
    for read in (lambda: parse_scontrol(text), lambda: expand_hosts(text)):
        try:
            read()
        except UserError as error:
            assert "\n" not in str(error).strip()


@settings(deadline=None, max_examples=60)
@given(st.text(alphabet="ab01,; \n\t#-", max_size=60))
def test_no_file_makes_it_fail_otherwise(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.mktemp("fuzz") / "file"
    file.write_text(text)
    try:
        found = read_file(file)
    except UserError:
        return
    assert np.array_equal(found.distance, found.distance.T) and not found.distance.diagonal().any()


def test_hosts_are_spelt_out_as_slurm_does() -> None:
    text = "n[1-3,07],r[1-2]n[09-10]x,login"
    names = ["n1", "n2", "n3", "n07", "r1n09x", "r1n10x", "r2n09x", "r2n10x", "login"]
    assert expand_hosts(text) == names
    with pytest.raises(UserError, match="more than a million"):
        expand_hosts("n[0-9999999]")
    with pytest.raises(UserError, match="more than a million"):
        expand_hosts("a[1-2000]b[1-2000]")


@pytest.mark.slurm
@settings(deadline=None, max_examples=15)
@given(
    st.lists(
        st.tuples(st.integers(0, 120), st.integers(0, 12), st.sampled_from([1, 2, 3])), min_size=1, max_size=4
    )
)
def test_hosts_are_those_of_scontrol(
    tmp_path_factory: pytest.TempPathFactory, ranges: list[tuple[int, int, int]]
) -> None:
    config = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    config.write_text("ClusterName=none\nSlurmctldHost=localhost\nNodeName=localhost\n")
    inside = ",".join(f"{low:0{width}}-{low + more:0{width}}" for low, more, width in ranges)
    text = f"n[{inside}],r[1-2]n[09-11]"
    command = ["scontrol", "show", "hostnames", text]
    answer = subprocess.run(
        command, env=os.environ | {"SLURM_CONF": str(config)}, capture_output=True, text=True, timeout=30
    )
    assert answer.returncode == 0, answer.stderr
    assert expand_hosts(text) == answer.stdout.split()
