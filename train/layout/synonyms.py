"""Other names for keys of the configuration, and what giving one key says about another. Imports no torch."""

SYNONYMS = {
    "data_parallel_size": "parallel.dp",
    "tensor_parallel_size": "parallel.tp",
    "pipeline_parallel_size": "parallel.pp",
    "context_parallel_size": "parallel.cp",
    "micro_batch_size": "parallel.micro_batch_size",
    "gradient_accumulation_steps": "parallel.gradient_accumulation_steps",
}
"""Names that other trainers use -> our keys; accepted wherever a setting is."""

IMPLIED = {"parallel.gradient_accumulation_steps": "loop.global_batch_size=null"}
"""Key -> the setting that comes with a value for it, unless that setting's own key is given too."""
