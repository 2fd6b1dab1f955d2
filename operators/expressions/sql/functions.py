"""The functions of SQL expressions: only functions of one record, without files, tables, time or random."""

from __future__ import annotations

import difflib
from typing import Final

from .tokens import SqlError, words

MANY: Final = 250
"""The most arguments of functions that take any number of them."""

FUNCTIONS: Final[dict[str, tuple[int, int]]] = {
    # numbers
    "ABS": (1, 1), "CBRT": (1, 1), "CEIL": (1, 1), "CEILING": (1, 1), "DIV": (2, 2), "EXP": (1, 1),
    "FLOOR": (1, 1), "LN": (1, 1), "LOG": (1, 2), "LOG10": (1, 1), "LOG1P": (1, 1), "LOG2": (1, 1),
    "MOD": (2, 2), "PI": (0, 0), "POW": (2, 2), "POWER": (2, 2), "ROUND": (1, 2), "SIGN": (1, 1),
    "SQRT": (1, 1), "TRUNC": (1, 2), "TRUNCATE": (1, 2), "ERF": (1, 1),
    # angles
    "ACOS": (1, 1), "ACOSD": (1, 1), "ASIN": (1, 1), "ASIND": (1, 1), "ATAN": (1, 1), "ATAND": (1, 1),
    "ATAN2": (2, 2), "ATAN2D": (2, 2), "COS": (1, 1), "COSD": (1, 1), "COT": (1, 1), "COTD": (1, 1),
    "DEGREES": (1, 1), "RADIANS": (1, 1), "SIN": (1, 1), "SIND": (1, 1), "TAN": (1, 1), "TAND": (1, 1),
    # bits
    "BIT_AND": (2, 2), "BITAND": (2, 2), "BIT_COUNT": (1, 1), "BITCOUNT": (1, 1), "BIT_NOT": (1, 1),
    "BITNOT": (1, 1), "BIT_OR": (2, 2), "BITOR": (2, 2), "BIT_XOR": (2, 2), "BITXOR": (2, 2),
    # choices
    "COALESCE": (1, MANY), "GREATEST": (1, MANY), "IF": (3, 3), "IFNULL": (2, 2), "LEAST": (1, MANY),
    "NULLIF": (2, 2),
    # text
    "BIT_LENGTH": (1, 1), "CHAR_LENGTH": (1, 1), "CHARACTER_LENGTH": (1, 1), "CONCAT": (1, MANY),
    "CONCAT_WS": (2, MANY), "ENDS_WITH": (2, 2), "INITCAP": (1, 1), "LEFT": (2, 2), "LENGTH": (1, 1),
    "LOWER": (1, 1), "LPAD": (2, 3), "LTRIM": (1, 2), "NORMALIZE": (1, 1), "OCTET_LENGTH": (1, 1),
    "REGEXP_LIKE": (2, 3), "REGEXP_REPLACE": (3, 4), "REPLACE": (3, 3), "REVERSE": (1, 1),
    "RIGHT": (2, 2), "RPAD": (2, 3), "RTRIM": (1, 2), "SPLIT_PART": (3, 3), "STARTS_WITH": (2, 2),
    "STRING_TO_ARRAY": (2, 2), "STRPOS": (2, 2), "SUBSTR": (2, 3), "TRIM": (1, 1), "UPPER": (1, 1),
    # time
    "DATE": (1, 2), "DATE_PART": (2, 2), "DAY": (1, 1), "DAYOFMONTH": (1, 1), "DAYOFWEEK": (1, 1),
    "DAYOFYEAR": (1, 1), "HOUR": (1, 1), "MINUTE": (1, 1), "MONTH": (1, 1), "QUARTER": (1, 1),
    "SECOND": (1, 1), "STRFTIME": (2, 2), "STRPTIME": (2, 2), "TIMESTAMP": (1, 2), "WEEK": (1, 1),
    "YEAR": (1, 1),
    # lists
    "ARRAY_CONTAINS": (2, 2), "ARRAY_GET": (2, 2), "ARRAY_LENGTH": (1, 1), "ARRAY_LOWER": (1, 1),
    "ARRAY_MEAN": (1, 1), "ARRAY_REVERSE": (1, 1), "ARRAY_SUM": (1, 1), "ARRAY_TO_STRING": (2, 2),
    "ARRAY_UNIQUE": (1, 1), "ARRAY_UPPER": (1, 1),
}  # fmt: skip
"""The least and the most arguments, by name."""

UNITS: Final = words(
    """MILLENNIUM CENTURY DECADE YEAR ISOYEAR QUARTER MONTH WEEK DAY DOW ISODOW DOY HOUR MINUTE SECOND
    MILLISECOND MICROSECOND NANOSECOND EPOCH TIME TIMEZONE"""
)
"""The parts that EXTRACT and DATE_PART take from a time."""

_AGGREGATES: Final = words(
    """SUM AVG MEAN COUNT MIN MAX FIRST LAST MEDIAN STDDEV STDDEV_POP STDDEV_SAMP STDEV VAR VARIANCE
    VAR_POP VAR_SAMP ARRAY_AGG STRING_AGG LISTAGG QUANTILE QUANTILE_CONT QUANTILE_DISC CORR COVAR
    COVAR_POP
    COVAR_SAMP APPROX_COUNT_DISTINCT APPROX_QUANTILE COUNT_DISTINCT"""
)
_WINDOWS: Final = words(
    """ROW_NUMBER RANK DENSE_RANK PERCENT_RANK CUME_DIST NTILE LAG LEAD FIRST_VALUE LAST_VALUE
    NTH_VALUE"""
)
_SEVERAL_ROWS: Final = frozenset(["UNNEST", "EXPLODE", "GENERATE_SERIES"])
_CLOCK: Final = words(
    "NOW CURRENT_TIMESTAMP CURRENT_DATE CURRENT_TIME LOCALTIMESTAMP LOCALTIME TODAY"
)
ACROSS_FIX: Final = (
    "batches are cut by chance; to combine records use key_by(...).window(...).agg(...)"
)


class AcrossError(SqlError):
    """The expression reads other records than its own; `message` says how."""


class ClockError(SqlError):
    """The expression reads the current time; `message` is the word by which it does."""


def refuse_clock(word: str) -> None:
    """Refuse words that mean the current time.

    Raises:
        ClockError: `word` is one.
    """
    if word.upper() in _CLOCK:
        raise ClockError(word)


def check_call(written: str, arguments: int) -> str:
    """Return the function's name in capitals, if it is one of `FUNCTIONS` and takes that many arguments.

    Raises:
        SqlError: it does not, or there is no such function.
        AcrossError: it is a function of several records.
        ClockError: it reads the current time.
    """
    name = written.upper()
    refuse_clock(written)
    if name in _WINDOWS:
        raise AcrossError("it is a window function")
    if name in _AGGREGATES:
        raise AcrossError("it aggregates")
    if name in _SEVERAL_ROWS:
        raise AcrossError("it makes several rows")
    if name not in FUNCTIONS:
        near = difflib.get_close_matches(name, FUNCTIONS, n=1)
        close = f"did you mean {near[0]}? " if near else ""
        raise SqlError(
            f"unknown function `{written}`",
            f"{close}docs/expressions.md lists them; for anything else use map or map_batches",
        )
    least, most = FUNCTIONS[name]
    if not least <= arguments <= most:
        shown = str(least) if least == most else f"{least} to {most}"
        raise SqlError(f"{name} takes {shown} arguments, not {arguments}")
    return name
