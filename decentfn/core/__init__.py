"""Foundations of the package: trees, buckets, scalars, numbers, random draws, messages. The room imports what others use of it."""

from decentfn.core.arguments import (
    MOST_WORKERS,
    array,
    at_least,
    bind,
    brief,
    brief_error,
    checks_arguments,
    checks_numbers,
    first_difference,
    log,
    no_such_argument,
    real,
    require,
    require_at_most,
    require_by,
    require_numbers_on_cpu,
    rule_of,
    warn,
    whole_number,
)
from decentfn.core.context import context
from decentfn.core.handles import by_handle, handle_of
from decentfn.core.scalars import BUFFERS, Numbers, as_step, number_on, of_step, once, operator, rounded, sent
from decentfn.core.stacking import batches_of, over_workers, require_first, require_rows
from decentfn.core.trees import PyTree
