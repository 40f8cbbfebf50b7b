"""What a run came to, and which of several was better: everything is read from run directories.

One run:
``run_data``     a run directory as numbers
``detectors``    known failures: evidence, cause, cure
``kl_view``      where the reverse KL lies; ``kl_tokens``: rollouts token by token
``report``       the run as a page; ``report_facts``, ``report_charts``: what stands on it
``live_curve``   its curves while it goes on

Several runs:
``comparison``   from runs to arms, intervals and verdicts; ``outcome``: what comes of it
``alignment``    runs on steps, tokens, device-seconds and money; ``placing``: each at the target
``measuring``    a metric of a run, per question where there are any
``arms``         which runs are equal but for the seed; ``pooling``: an arm as numbers
``statistics``   intervals, p-values, seeds needed; pure
``verdict``      what may be said, and in which words
``differences``  all in which runs differ
``reproduction`` whether reruns came to the same as their original; ``reproduction_words``,
                 ``reproduction_text``: shown
``comparison_page``, ``comparison_text``, ``comparison_charts``, ``comparison_words``: shown

Both:
``page``, ``charts``, ``drawing``: what pages are made of

No torch, no MLflow, no Prefect, no Ray in here; matplotlib, jinja2 and scipy only in here.
"""
