"""The stages of an experiment, as Prefect tasks: effects in, small records out.

``environment`` the run directory and the checks before anything starts
``session``     what must happen around the stages however the run ends: teardown, summary, tracking
``cluster``     the Ray cluster that the student runs on
``teacher``     teacher servers: launch, readiness
``student``     the training job: submit, follow
``tracking``    what is told of a run: tags, model card, summary table
``console``     what a person at the terminal sees meanwhile
"""
