"""What a site's partitions and QOS allow, against every possibility tried one by one."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import ConfigError
from slurm.sites.limits import check_limits, describe
from slurm.sites.profile import Limit

_PARTITIONS = st.sampled_from([None, "p", "q"])
_QOS = st.sampled_from([None, "short", "long"])
_LIMITS = st.lists(
    st.builds(
        Limit,
        partition=_PARTITIONS,
        qos=_QOS,
        min_nodes=st.integers(1, 6),
        max_nodes=st.none() | st.integers(1, 8),
        max_hours=st.none() | st.sampled_from([0.5, 1.0, 24.0, 96.0]),
    ),
    max_size=6,
)


def fits(
    limits: list[Limit], partition: str | None, qos: str | None, nodes: int, hours: float
) -> bool | None:
    """The rule, written anew: None is that nothing is said of the partition and the QOS."""
    verdicts = []
    for limit in limits:
        if limit.qos == qos and (limit.partition == partition or limit.partition is None):
            too_many = limit.max_nodes is not None and nodes > limit.max_nodes
            too_long = limit.max_hours is not None and hours > limit.max_hours
            verdicts.append(not (too_many or too_long or nodes < limit.min_nodes))
    return any(verdicts) if verdicts else None


def chosen(advice: str, partition: str | None, qos: str | None) -> tuple[str | None, str | None]:
    """The partition and the QOS that somebody has who follows the advice."""
    for key, value in re.findall(r"job\.(partition|qos)=(\w+)", advice):
        if key == "partition":
            partition = value
        else:
            qos = None if value == "null" else value
    return partition, qos


@pytest.mark.req("C3")
@given(_LIMITS, _PARTITIONS, _QOS, st.integers(1, 10), st.sampled_from([0.25, 1.0, 12.0, 48.0, 200.0]))
def test_a_job_is_refused_where_it_does_not_fit_and_the_advice_fits(
    limits: list[Limit], partition: str | None, qos: str | None, nodes: int, hours: float
) -> None:
    expected = fits(limits, partition, qos, nodes, hours)
    if expected is not False:
        check_limits(limits, partition, qos, nodes, hours)
        return
    with pytest.raises(ConfigError) as error:
        check_limits(limits, partition, qos, nodes, hours)
    sentence = str(error.value)
    assert "\n" not in sentence
    anything = any(fits([limit], limit.partition, limit.qos, nodes, hours) for limit in limits)
    assert ("nothing here takes that" in sentence) == (not anything)
    if anything:
        for advice in sentence.rpartition(": give ")[2].split(" or "):
            assert fits(limits, *chosen(advice, partition, qos), nodes, hours), advice


@pytest.mark.req("C3")
@pytest.mark.parametrize(
    ("qos", "nodes", "hours", "sentence"),
    [
        (
            None,
            100,
            24,
            "100 nodes for 24 h is not within what partition prod allows (at most 64 nodes, at most 24 h): "
            "give job.qos=big",
        ),
        (
            "dbg",
            1,
            3,
            "1 node for 3 h is not within what partition prod with QOS dbg allows (at most 2 nodes, at most "
            "30 min): give job.qos=null cluster.qos=null or job.qos=long",
        ),
        (
            None,
            16,
            48,
            "16 nodes for 48 h is not within what partition prod allows (at most 64 nodes, at most 24 h): "
            "nothing here takes that, the most for 48 h is 8 nodes (job.partition=prod job.qos=long) and the "
            "longest for 16 nodes is 24 h (job.partition=prod)",
        ),
        (
            None,
            500,
            200,
            "500 nodes for 200 h is not within what partition prod allows (at most 64 nodes, at most "
            "24 h): nothing here takes that, job.partition=prod: at most 64 nodes, at most 24 h; job.partition=prod "
            "job.qos=big: 65-256 nodes, at most 24 h; job.partition=prod job.qos=long: at most 8 nodes, at most 96 h; "
            "job.partition=prod job.qos=dbg: at most 2 nodes, at most 30 min",
        ),
    ],
)
def test_refusals_name_what_would_take_the_job(
    qos: str | None, nodes: int, hours: float, sentence: str
) -> None:
    limits = [
        Limit("prod", None, max_nodes=64, max_hours=24),
        Limit("prod", "big", min_nodes=65, max_nodes=256, max_hours=24),
        Limit("prod", "long", max_nodes=8, max_hours=96),
        Limit("prod", "dbg", max_nodes=2, max_hours=0.5),
    ]
    with pytest.raises(ConfigError) as error:
        check_limits(limits, "prod", qos, nodes, hours)
    assert str(error.value) == sentence


def test_limits_in_words() -> None:
    assert describe(Limit()) == "any number of nodes, any time"
    assert describe(Limit(min_nodes=17)) == "17 nodes or more, any time"
