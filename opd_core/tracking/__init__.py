"""From the run's journal to MLflow and TensorBoard.

journal.py           `metrics.jsonl`: what the training driver appends and everybody else reads
shipper.py           threads of the flow process that bring the journal to the sinks
sink.py              what a sink is, and how a run's end is told to it
mlflow_sink.py       one MLflow run, fed by one thread
mlflow_check.py      the journal against what MLflow has, point by point
mlflow_comparison.py  a comparison as an MLflow run, and tags on the runs that it compared
tensorboard_sink.py  event files, without torch or tensorflow
names.py             metric names that both accept, and finite points

The journal is the truth and is written first; a sink is a copy of it that may be late, incomplete
or rebuilt. Importing any module here imports neither mlflow nor tensorboard: a sink imports its
library when it is created, which the shipper does in the sink's own thread.
"""
