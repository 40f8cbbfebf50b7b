"""The stages of an experiment, as Prefect tasks: effects in, small records out.

``environment`` the run directory and the checks before anything starts
``session``     what must happen around the stages however the run ends: teardown, summary, tracking
``cluster``     the Ray cluster that the student runs on
``teacher``     teacher servers: launch, readiness, starting one again
``watch``       looks after the teachers while the student trains
``student``     the training job: submit, follow
``cards``       the pair check card: terminal, artifact, run directory
``tracking``    what is told of a run: tags, model card, summary table
``console``     what a person at the terminal sees meanwhile
"""
