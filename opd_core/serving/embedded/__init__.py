"""The embedded teacher: a small server that speaks SGLang's native protocol and only scores.

    python -m opd_core.serving.embedded --model-path DIR --port N

It stands in for SGLang where there is no GPU: the same requests, answers and error statuses, with
real forward passes of transformers behind them. It never generates, and where a bad request would
bring SGLang down (an id outside the vocabulary, an empty row) it answers 400 and lives.

requests.py   what is asked of the model, what it answers, and the checks before it is asked
model.py      the frozen causal model and its exact padded forward
batching.py   the queue before the model, and the thread that runs it
wire.py       JSON of SGLang's protocol to requests, results to JSON
health.py     whether the server scores, at the price of at most one probe
app.py        routes, API key, errors as statuses
process.py    command line, socket, signals

With --chaos FILE things go wrong on purpose (docs/chaos.md); without it none of this is loaded:

chaos.py          the layer before the application
chaos_script.py   which fault meets which request
chaos_answers.py  true answers made wrong
"""
