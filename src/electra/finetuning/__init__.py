"""Tasks x seeds put together: the model, the files, the runs, the results. The only place of fine-tuning that knows all.

    OUT/results.md, results.json        the table over tasks and seeds
    OUT/TASK/settings.json, curves.png  what the runs of a task have in common; dev score against steps
    OUT/TASK/seed-N/                    one finished run: a model folder with task.json, result.json and its outputs
    OUT/submission/*.tsv                what a benchmark's server wants, where a test split exists

A run's folder appears whole when the run is done: what is there is kept, what is missing is done again.
"""
