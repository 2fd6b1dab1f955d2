"""A Ray Dataset as a bounded source.

Ray computes the dataset once per run of the job, and its rows are kept as Parquet in the job's storage.
From then on this is the Parquet source.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict, Unpack, overload

from ...errors import UsageError
from ...operators.schema import ColumnsLike, SchemaLike, record_class, to_schema
from ...operators.sizes import parse_size
from ...operators.source import BATCH_ROWS, Record, Record_co
from ..arguments import check_count
from ..bad_records import BadRecordPolicy, parse_policy
from ..prepared.result import ResultFiles
from ..prepared.source import PreparedSource
from .columns import dataset_schema
from .result import RAY, RayResult, is_dataset

SPLIT_BYTES = "16mb"


class RayDatasetSource(PreparedSource[Record_co]):
    """The rows of a Ray Dataset, each read exactly once."""

    def describe(self) -> str:
        return f"ray_dataset({self.maker.describe()})"


class RayDatasetOptions(TypedDict, total=False):
    """The keyword arguments of `ray_dataset_source`, which documents them."""

    keep_result: bool
    on_bad_record: BadRecordPolicy
    batch_rows: int
    split_bytes: str


@overload
def ray_dataset_source(
    dataset: Callable[[], Any] | Any, schema: type[Record], **options: Unpack[RayDatasetOptions]
) -> RayDatasetSource[Record]: ...
@overload
def ray_dataset_source(
    dataset: Callable[[], Any] | Any,
    schema: ColumnsLike | None = ...,
    **options: Unpack[RayDatasetOptions],
) -> RayDatasetSource: ...
def ray_dataset_source(
    dataset: Callable[[], Any] | Any,
    schema: SchemaLike | None = None,
    *,
    keep_result: bool = False,
    on_bad_record: BadRecordPolicy = "fail",
    batch_rows: int = BATCH_ROWS,
    split_bytes: str = SPLIT_BYTES,
) -> RayDatasetSource:
    """Return a bounded source of a Ray Dataset.

    Ray computes the dataset once per run of the job, before the job reads, and its rows are kept in the
    job's storage until the job has finished.

    Args:
        dataset: a Ray Dataset, or a function without arguments that returns one. The function is called
            where the coordinator is.
        schema: the columns to read: a Struct class, a `pyarrow.Schema` or {name: type}. Other columns are
            left out. A function needs one; of a dataset it is by default the dataset's own.
        keep_result: keep the rows when the job has finished or a new run has made others, for savepoints
            that were taken while they were read.
        on_bad_record: the treatment of a row that does not fit the schema: `fail`, `drop` (counted in
            `headgate_source_record_errors_total`), or `side_output` (`rejected`).
        batch_rows: the most rows of a batch. Batches of long rows have fewer, of about 16 MiB.
        split_bytes: the size in memory of the parts that subtasks take.

    Raises:
        UsageError: an argument is wrong, or a column of the dataset has a type that a stream cannot have.
    """
    policy = parse_policy(on_bad_record)
    check_count("batch_rows", batch_rows, 1)
    size = parse_size(split_bytes, "split_bytes")
    check_count("split_bytes", size, 1)
    if not is_dataset(dataset) and not (callable(dataset) and not isinstance(dataset, type)):
        raise UsageError(
            f"not a Ray Dataset dataset=`{dataset!r}`",
            fix="give a dataset, such as ray.data.read_parquet(...), or a function that returns one",
        )
    if schema is None and not is_dataset(dataset):
        raise UsageError(
            "a function that makes a Ray Dataset needs a schema, because it is not called here",
            fix='give schema=..., such as {"id": "int64", "name": "string"} or a Struct class',
        )
    columns = to_schema(dataset_schema(dataset) if schema is None else schema)
    files = ResultFiles(columns, policy, batch_rows, record_class(schema), RAY)
    name = "dataset" if is_dataset(dataset) else getattr(dataset, "__name__", "function")
    return RayDatasetSource(RayResult(dataset, str(name), size), files, keep_result)
