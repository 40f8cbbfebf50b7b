"""Training the student on Ray.

One update:
``batch``       groups → the numbers one train step needs
``packing``     a step's samples → micro-batches of like work for each rank, packed or padded
``attention``   attention that never crosses the boundary of a packed sequence
``policy``      the student as a module that gives logprobs; what FSDP shards
``sharding``    how ranks meet and share one copy of the student
``lora``        adapters in, plain weights out
``schedule``    the learning rate of every optimizer step
``learner``     one rank's part of the student and its optimizer: batch in, metrics out
``step_statistics`` the metrics of one train step over all ranks

The loop and what it leaves on disk:
``loop``        collect → record → update → sync weights → evaluate → save; knows no Ray
``step_files``  names of files that there are one for each train step
``step_records`` the batches that a resumed run trains on again
``checkpoint``  one rank's part of a checkpoint; ``checkpoint_folder``: which of them are whole
``organs``      what the loop wants of learner and sampler
``step_log``    the journal's writing end, which writes nothing twice
``step_costs``  what a train step costs, and the run so far
``kl_sums``     where the reverse KL lies, by ``vocabulary``'s kinds of token; ``token_kl``: its
files
``questions``   an evaluation question by question; ``evaluation_records``: its files
``system_metrics`` the load of the driver's host
``stopping``    when a target ends training early
``models``      loading and saving Hugging Face models and tokenizers
``assembly``    puts the loop together; ``local``: its organs in one process

On Ray:
``actors``      sampling and training actors; ``handles``: training actors behind the loop's
protocol
``ray_sampler`` sampling actors behind the protocol of an engine; ``ticket_sampler``: what is not
Ray's in it; ``engine_thread``: an engine that decodes in a thread
``served_student`` the engine over the student's servers; ``weight_push``, ``weight_buckets``: how
weights reach them other than over files
``placement``   where the actors live
``leases``      one limit for several agent loops
``driver``      the Ray job: builds everything from a run directory and runs the loop
``head``        the command of a private Ray head; ``jobs``: the only module that talks to the
Jobs API

The run directory:
``files``       its files, through which flow and job speak
``attempts``    the starts of one run; ``forks``: a new run from another's checkpoint
``lineage``     what a resume may change
``results``     what a run came to
"""
