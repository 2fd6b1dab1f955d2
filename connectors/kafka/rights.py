"""Checks before the first record that the user has the rights that a source or a sink needs.

Without them, a missing right would show with the first record, or with the first checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from ...errors import UsageError
from .client import ErrorListener, client_properties
from .security import fits_kafka_python
from .transactions import TransactionClient

_ANSWER_S: Final = 8.0


def check_topic_rights(
    bootstrap: str, properties: Mapping[str, str], topics: Iterable[str], needed: Iterable[str]
) -> None:
    """Check that the user has rights on topics that exist.

    Args:
        bootstrap: the brokers.
        properties: of the client.
        topics: their names.
        needed: operations of Kafka, such as `READ`.

    Raises:
        UsageError: a right is missing.
    """
    from confluent_kafka import KafkaException, TopicCollection
    from confluent_kafka.admin import AdminClient

    names = list(topics)
    if not names:
        return  # nothing fits the pattern yet
    errors = ErrorListener()
    admin = AdminClient(client_properties(bootstrap, properties, errors))
    described = admin.describe_topics(
        TopicCollection(names),
        include_authorized_operations=True,
        request_timeout=_ANSWER_S,
    )
    for topic, answer in described.items():
        try:
            found = answer.result().authorized_operations
        except KafkaException:
            continue  # it is just being created or deleted; then the first request will tell
        if not found:
            continue  # the brokers do not say
        allowed = {operation.name for operation in found}
        for right in needed:
            if right not in allowed:
                raise missing_right(right, "topic", topic)


def check_group_right(bootstrap: str, properties: Mapping[str, str], group: str) -> None:
    """Check that the user may write offsets of a consumer group, which needs READ.

    Raises:
        UsageError: the right is missing.
    """
    if not fits_kafka_python(properties):
        return  # it cannot be asked; the offsets are information only
    client = TransactionClient(bootstrap, properties)
    try:
        allowed = client.may_read_group(group)
    finally:
        client.close()
    if not allowed:
        raise missing_right("READ", "group", group)


def missing_right(right: str, kind: str, name: str) -> UsageError:
    """Return the error for a right that the user does not have.

    Args:
        right: such as `READ`.
        kind: of the resource, as the tool of Kafka calls it: `topic`, `group` or `transactional-id`.
        name: of the resource; one that ends with `*` stands for all that begin so.
    """
    pattern = " --resource-pattern-type prefixed" if name.endswith("*") else ""
    return UsageError(
        f"the user of Kafka does not have a right right=`{right}` {kind}=`{name}`",
        fix=f"kafka-acls.sh --add --allow-principal User:NAME --operation {right} "
        f"--{kind} {name.removesuffix('*')}{pattern}",
    )


def named_right(code: int) -> UsageError | None:
    """Return the right that a transaction lacks by an error code of Kafka; None: it says something else."""
    from confluent_kafka import KafkaError

    return {
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: missing_right(
            "WRITE", "transactional-id", "hg-*"
        ),
        KafkaError.GROUP_AUTHORIZATION_FAILED: missing_right("READ", "group", "hg-*"),
    }.get(code)
