"""The stages of an experiment, as Prefect tasks: effects in, small records out.

``checks``      everything that is checked before anything starts
``environment`` what is to be run, and the run directory
``session``     what the stages of one run share
``experiment``  what must happen around the stages; ``ending``: however they end; ``signals``
``cluster``     the Ray cluster that the student runs on
``servers``     any server that the run starts: launching one, starting it again
``teacher``     the teachers: launch, readiness that is proven by scoring
``kept_teacher`` one that is kept across runs: up, down; ``kept_use``: a run that uses it
``samplers``    the student's servers, where servers sample
``watch``       looks after the servers while the student trains
``student``     the training job: submit, follow
``devices``     the run's devices are nobody else's; ``secrets``: from where they are kept
``guard``       ends a flow that nobody looks after; ``hooks``: what Prefect's final state sets free
``settle``      what a dead flow could not write (``late_tracking``, ``flow_state``)
``reaping``     ends what dead runs left; ``receipts``: how a run's own end is shown
``unclean``     a run that left something, as an event of Prefect
``live``        a run as Prefect shows it meanwhile: ``board`` (artifacts), ``health`` (servers),
                ``forwarding`` (logs), ``links``, ``names`` (of task runs)
``cards``       the pair check card: terminal, artifact, run directory
``summary``     what a run came to: summary, model card, table; ``findings``: known failures, live
``tracking``    the journal to MLflow and TensorBoard; ``mlflow_run``: tags and params
``sync``        all of it once more, compared point by point
``provenance``  code, packages and machine
``evaluation``  a model's held-out accuracy, without a run
``comparing``   runs found (``lookup``), compared, kept as files and in MLflow (``mlflow_compared``)
``rerunning``   an experiment again, and its verdict; ``children``: runs of another deployment
``console``     what a person at the terminal sees meanwhile
``temporary_server``  Prefect's server for the length of one command
"""
