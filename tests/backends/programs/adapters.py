"""A worker that runs an example of a framework over dmltrain, and says what came of it: python adapters.py EXAMPLE"""

import dataclasses
import hashlib
import json
import os
import runpy
import sys


def digest(model):
    content = b"".join(value.detach().numpy().tobytes() for _, value in sorted(model.state_dict().items()))
    return hashlib.sha256(content).hexdigest()


def lightning(module):
    trainer = module["main"]()
    checkpoint, score = trainer.checkpoint_callback, trainer.checkpoint_callback.best_model_score
    dealt = trainer.train_dataloader.sampler.num_replicas
    (again,) = trainer.validate(dataloaders=trainer.val_dataloaders, ckpt_path="best", verbose=False)
    return {
        "weights": digest(trainer.model),
        "accuracy": again["accuracy"],
        "stopped": trainer.current_epoch < trainer.max_epochs,
        "checkpoint": abs(float(score) - again["loss"]) < 1e-6 and checkpoint.best_model_path,
        "dealt": dealt,
    }


def accelerate(module):
    accelerator = module["main"]()
    (model,) = accelerator._models
    before = digest(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    accelerator.wait_for_everyone()  # until worker 0 has written all of it
    accelerator.load_state("checkpoint")
    return {"weights": before, "restored": digest(model) == before, "dealt": accelerator.num_processes}


def transformers(module):
    import transformers

    import dmltrain

    class Audited(transformers.Trainer):
        def get_train_dataloader(self):
            return dmltrain.audited(super().get_train_dataloader())

    trainer = module["main"]()
    changes = {"output_dir": "audited", "eval_strategy": "no", "save_strategy": "steps", "num_train_epochs": 2}
    for steps, begin in ((15, None), (-1, "audited/checkpoint-10")):
        arguments = dataclasses.replace(trainer.args, **changes, save_steps=10, max_steps=steps)
        again = Audited(module["Digits"](), arguments, train_dataset=trainer.train_dataset)
        again.train(resume_from_checkpoint=begin)
    return {
        "weights": digest(trainer.model),
        "accuracy": trainer.state.log_history[-2]["eval_accuracy"],
        "dealt": trainer.args.world_size,
    }


if __name__ == "__main__":
    os.environ["TMPDIR"] = os.getcwd()  # torch's compiler, which Lightning imports, makes a folder there
    module = runpy.run_path(sys.argv[1])  # a server's process ends there
    facts = globals()[sys.argv[1].rpartition("/")[2].partition("_")[0]](module)

    import torch.distributed

    import dmltrain.torch

    print("facts", json.dumps({**facts, "bytes": dmltrain.torch.bytes_summed()}), flush=True)
    torch.distributed.destroy_process_group()
