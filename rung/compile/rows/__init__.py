"""Row independence: which dynamic dimensions of a traced graph may be padded, proved op by op.

A closed table (`rules`) says for each op which dimension of its results holds the rows of its arguments, or that it mixes rows. What has no
rule is not proved. `Rows` of one dimension and their place in a tensor: `state`."""

from rung.compile.rows.state import Verdict, Verdicts
from rung.compile.rows.walk import output_dims, prove_rows

__all__ = ["Verdict", "Verdicts", "output_dims", "prove_rows"]
