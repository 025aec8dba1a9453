"""What is seen of a run: ``progress`` (what it prints, and the timer of its steps), ``health`` (numbers to watch, and
when they end a run), ``resources`` (the model's size, its ranks, their memory, the FLOP/s of updates) with
``resource_file`` (what a run's folder keeps of them), ``trackers`` (where metrics go: a file, TensorBoard, your own),
``wandb_tracker`` (to Weights & Biases), ``mlflow_tracker`` (to MLflow), ``hooks`` (your code at turning points).
"""
