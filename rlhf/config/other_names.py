"""Names that TRL, trlx, OpenRLHF, verl and DeepSpeed-Chat give to our keys."""

from __future__ import annotations

from collections.abc import Iterable

from rlhf.config.choices import Phase

# Our overrides (alternatives separated by " or ") -> the names in the other programs. VALUE, N and
# NAME stand for a value, and * for each of the phases. A dotted name also matches the end of a
# longer name: rollout.n is actor_rollout_ref.rollout.n too. A name whose last part is the last part
# of one of our keys needs no entry.
NAMES = {
    # Models
    "model=pretrained model.path=VALUE": "model_name_or_path pretrain model_path actor.model.path "
    "actor_rollout_ref.model.path actor_model_name_or_path actor_model pretrained_model "
    "model_id base_model sft_model_path",
    "model@reward_model=pretrained reward_model.path=VALUE": "reward_model_path reward_pretrain "
    "critic_pretrain critic_model_name_or_path critic.model.path reward_model.model.path",
    "model.tokenizer": "tokenizer_path tokenizer_name_or_path tokenizer_name",
    "model.revision": "model_revision",
    "model.end_token": "eos_token eot_token add_eot_token stop_token_id",
    "model.attention": "attn_implementation flash_attn use_flash_attention flash_attention_2 "
    "use_flash_attn",
    "model.gradient_checkpointing": "enable_gradient_checkpointing actor_gradient_checkpointing "
    "use_gradient_checkpointing gradient_checkpointing_kwargs",
    "reward_model.gradient_checkpointing": "critic_gradient_checkpointing",
    "model.dropout or ppo.actor_dropout": "disable_dropout",
    # Precision and machines
    "hardware.dtype": "precision torch_dtype dtype model_dtype mixed_precision param_dtype",
    "hardware.dtype=bf16": "bf16 bfloat16",
    "hardware.dtype=fp16": "fp16",
    "hardware.dtype=fp32": "fp32",
    "hardware.nodes": "num_nodes nnodes actor_num_nodes num_machines ref_num_nodes "
    "critic_num_nodes reward_num_nodes",
    "hardware.ranks_per_node": "n_gpus_per_node num_gpus nproc_per_node actor_num_gpus_per_node "
    "num_processes gpus num_gpus_per_node",
    "hardware=NAME": "deployment_type",
    "launcher.master_port": "main_process_port port",
    "launcher.master_addr": "main_process_ip",
    "launcher.timeout_minutes": "ddp_timeout nccl_timeout",
    # DeepSpeed
    "zero=stageN": "zero_stage actor_zero_stage zero_optimization",
    "zero=NAME": "deepspeed deepspeed_config ds_config fsdp fsdp_config accelerate_config "
    "deepspeed_plugin strategy",
    "zero.critic_stage": "critic_zero_stage reward_zero_stage",
    "zero=stage2_offload or zero=stage3_offload": "offload cpu_offload adam_offload",
    "zero.offload_optimizer": "optimizer_offload",
    "zero.offload_parameters": "param_offload offload_param",
    "zero.offload_reference": "offload_reference_model ref_reward_offload",
    "zero.offload_reward": "offload_reward_model",
    "zero.hpz_partition_size": "zpg zero_hpz_partition_size",
    "zero=stage3_mixzpp": "enable_mixed_precision_lora mixed_precision_lora",
    "rollout=hybrid_engine": "enable_hybrid_engine",
    "rollout.hybrid_engine.inference_tp_size": "tensor_model_parallel_size "
    "vllm_tensor_parallel_size rollout.tensor_parallel_size",
    "rollout.hybrid_engine.pin_parameters=false": "unpin_actor_parameters",
    "rollout.gather_weights": "ds3_gather_for_generation",
    # Adapters
    "lora=default": "use_peft peft_config use_lora",
    "lora=default lora.rank=VALUE": "lora_rank lora_r lora_dim actor_lora_dim",
    "lora.critic_rank": "critic_lora_dim",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.target_modules": "lora_target_modules lora_module_name actor_lora_module_name "
    "critic_lora_module_name target_modules",
    "lora.train_rest=false": "only_optimize_lora",
    "lora.lr": "lora_learning_rate actor_lora_learning_rate",
    "lora.critic_lr": "critic_lora_learning_rate",
    # Optimizers
    "sft.lr or reward.lr or dpo.lr or ppo.actor_lr or ppo.critic_lr": "lr learning_rate",
    "ppo.actor_lr": "actor_learning_rate actor.optim.lr",
    "ppo.critic_lr": "critic_learning_rate critic.optim.lr",
    "*.lr_schedule": "lr_scheduler lr_scheduler_type scheduler.name warmup_style",
    "*.min_lr_ratio": "min_lr eta_min",
    "*.warmup_steps": "num_warmup_steps lr_warmup_steps warmup_ratio lr_warmup_ratio "
    "lr_warmup_steps_ratio",
    "*.weight_decay": "l2",
    "ppo.weight_decay": "actor_weight_decay",
    "ppo.critic_weight_decay": "critic_weight_decay",
    "*.beta1": "adam_beta1 adam_betas betas",
    "*.beta2": "adam_beta2",
    "*.adam_eps": "adam_epsilon eps",
    "*.max_grad_norm": "max_norm grad_clip gradient_clipping",
    # Batches and steps
    "sft.batch_size or reward.batch_size or dpo.batch_size or ppo.mini_batch_size or "
    "ppo.rollout_batch_size": "batch_size global_batch_size train_batch_size "
    "per_device_train_batch_size",
    "ppo.rollout_batch_size": "data.train_batch_size num_rollouts generation_batch_size "
    "per_device_generation_batch_size generation_batches",
    "ppo.mini_batch_size": "ppo_mini_batch_size num_mini_batches per_device_training_batch_size",
    "ppo.micro_batch_size": "ppo_micro_batch_size ppo_micro_batch_size_per_gpu "
    "micro_rollout_batch_size local_rollout_forward_batch_size log_prob_micro_batch_size "
    "log_prob_micro_batch_size_per_gpu use_dynamic_bsz",
    "*.micro_batch_size": "gradient_accumulation_steps micro_train_batch_size "
    "train_micro_batch_size_per_gpu micro_batch_size_per_gpu",
    "hardware.max_micro_batch_size": "per_device_eval_batch_size eval_batch_size val_batch_size",
    "*.epochs": "num_train_epochs total_epochs max_epochs num_epochs num_episodes",
    "ppo.steps": "total_episodes max_steps total_steps total_training_steps test_stop_step",
    "ppo.ppo_epochs": "num_ppo_epochs noptepochs num_iterations",
    "ppo.responses_per_prompt": "rollout.n n_samples_per_prompt num_generations rloo_k "
    "num_return_sequences group_size",
    # The objective of PPO
    "ppo.kl_ctl": "kl_coef init_kl_coef kl_ctrl.kl_coef kl_loss_coef kl_coeff",
    "ppo.kl_ctl or dpo.beta": "beta",
    "ppo.kl_target": "kl_ctrl.target_kl method.target target adap_kl_ctrl kl_ctrl.type",
    "ppo.kl_horizon": "horizon kl_ctrl.horizon",
    "ppo.kl_estimator": "kl_penalty kl_loss_type",
    "ppo.kl_estimator=k3": "use_kl_estimator_k3",
    "ppo.kl_placement=loss": "use_kl_loss",
    "ppo.kl_placement=reward": "use_kl_in_reward",
    "ppo.kl_target or ppo.stop_update_kl": "target_kl",
    "ppo.stop_update_kl": "early_stopping",
    "ppo.cliprange": "clip_ratio eps_clip epsilon clip_ratio_low clip_range eps_clip_low_high",
    "ppo.cliprange_high": "clip_ratio_high epsilon_high",
    "ppo.dual_clip": "clip_ratio_c delta",
    "ppo.cliprange_value": "value_clip",
    "ppo.value_coef": "vf_coef",
    "ppo.entropy_coef": "ent_coef entropy_coeff entropy_loss_coef",
    "ppo.lam": "lambd gae_lambda",
    "ppo.advantage_estimator": "adv_estimator",
    "experiment=grpo or ppo.advantage_estimator=VALUE": "algorithm algo",
    "ppo.whiten_advantages": "no_advantage_std_norm normalize_advantage use_whitening",
    "ppo.scale_reward": "use_score_scaling use_score_norm normalize_reward",
    "ppo.reference_score_mean": "ref_mean",
    "ppo.reference_score_std": "ref_std",
    "ppo.clip_reward_value": "cliprange_reward score_clip reward_clip_range",
    "ppo.missing_end_penalty": "missing_eos_penalty non_eos_penalty",
    "ppo.missing_end_score": "penalty_reward_value",
    "rewards.NAME.function": "reward_funcs reward_fn custom_reward_function.path "
    "custom_reward_function.name",
    "rewards.NAME.url": "remote_rm_url",
    "rewards.NAME.weight": "reward_weights",
    "ppo.loss_aggregation": "loss_agg_mode",
    "ppo.loss_aggregation or dpo.loss": "loss_type",
    "ppo.actor_freeze_steps": "critic_warmup freezing_actor_steps freezing_steps",
    "ppo.ema_beta": "enable_ema ema",
    "ppo.ptx_coef": "unsup_coef",
    "data.ptx_path": "unsupervised_dataset_name pretrain_data",
    "data.ptx_subset": "unsupervised_dataset_config_name",
    "ppo.num_value_layers": "num_value_layers_unfrozen",
    "dpo.loss=ipo": "ipo",
    # Responses
    "rollout.max_response_tokens": "response_length max_new_tokens max_completion_length "
    "generate_max_len max_answer_seq_len max_response_length",
    "rollout.max_prompt_tokens": "max_prompt_length prompt_max_len max_prompt_seq_len "
    "prompt_length",
    "rollout.min_response_tokens": "min_new_tokens",
    "rollout.temperature or rollout.top_p or rollout.top_k": "generation_kwargs gen_kwargs "
    "generation_config gen_experience_kwargs sampling_params do_sample",
    "rollout.eval_temperature": "val_kwargs.temperature",
    "rollout.stop": "stop_token stop_sequences",
    "rollout=NAME": "use_vllm vllm_num_engines rollout.name",
    "rollout.max_rows": "chunk_size max_num_seqs",
    "sft.max_tokens or reward.max_tokens or dpo.max_tokens": "max_length max_seq_len "
    "max_seq_length max_len seq_length model_max_length",
    "sft.loss_on": "completion_only_loss assistant_only_loss train_on_inputs train_on_prompt",
    # Data
    "data=hub data.path=VALUE": "dataset_name dataset prompt_data train_dataset",
    "data=local data.path=VALUE": "train_files train_file data_path dataset_path data_files",
    "data.eval_path": "val_files eval_dataset",
    "data.split": "data_split",
    "data.subset": "dataset_config dataset_config_name",
    "data.train_split": "dataset_train_split prompt_split",
    "data.eval_split": "dataset_test_split dataset_eval_split",
    "data.sets.NAME.columns": "input_key label_key prompt_key chosen_key rejected_key output_key "
    "response_key dataset_text_field columns",
    "data.sets": "sft_only_data_path dataset_probs",
    "data.template=chat": "apply_chat_template chat_template chat_template_path",
    "data.template": "input_template",
    "data.cache_dir": "data_output_path",
    "data.bucket_by_length": "group_by_length balance_batch",
    # The run: output, checkpoints, loggers
    "run_dir": "output_dir save_path default_local_dir checkpoint_dir logging_dir ckpt_path",
    "name": "run_name exp_name experiment_name wandb_run_name",
    "resume": "resume_from_checkpoint resume_from_path load_checkpoint resume_mode",
    "phase=NAME": "step",
    "checkpoint.every_steps": "save_steps save_freq checkpoint_interval save_strategy",
    "checkpoint.keep": "save_total_limit max_ckpt_num max_actor_ckpt_to_keep",
    "checkpoint.best": "metric_for_best_model save_best",
    "checkpoint.load_best": "load_best_model_at_end",
    "checkpoint.patience": "early_stopping_patience",
    "*.eval_every": "eval_steps eval_interval test_freq eval_strategy",
    "ppo.eval_prompts": "eval_iters",
    "ppo.sample_every": "num_sample_generations log_val_generations print_answers "
    "print_answers_interval log_completions",
    "tracking.log_every": "logging_steps steps_per_print",
    "tracking=wandb or tracking=tensorboard": "report_to log_with logger tracker",
    "tracking=wandb": "use_wandb",
    "tracking=tensorboard": "use_tensorboard enable_tensorboard tensorboard_path",
    "tracking.project": "wandb_project project_name tracker_project_name",
    "tracking.entity": "wandb_org entity_name",
    "tracking.tags": "wandb_group",
    "seed": "data_seed",
}
# Whole words of other programs, which no command of ours can mean -> what to type instead.
FUNCTION = r"'rewards.NAME={kind: function, function: \1, run_code: true}'"
WORDS = {
    r"(?:trainer|phase)=grpo": "experiment=grpo",
    r"reward_model\.enable=false": "phase=pipeline_rule 'rewards.NAME={kind: KIND}'",
    r"model\.name=(.+)": r"model=pretrained model.path=\1",
    r"rewards?=([\w.]+:\w+)": FUNCTION,
    r"rewards?=(length|stop|pattern|exact|number|json)": r"'rewards.NAME={kind: \1}'",
    r"adapter=q?lora": "lora=default",
    r"load_in_[48]bit=.*": "lora=default (weights of 4 or 8 bits are not supported)",
    r"use_vllm=.*": "rollout=vllm_server",
    r"resume=true": "resume=auto",
    r"wandb=.*": "tracking=wandb",
}

# Our alternatives for each name of another program.
OTHER_NAMES = {
    name: [
        word.replace("*", phase)
        for word in ours.split(" or ")
        for phase in (Phase if "*" in word else ("",))
    ]
    for ours, others in NAMES.items()
    for name in others.split()
}


def suggested_keys(name: str, keys: Iterable[str]) -> list[str]:
    """Return the keys that the user may have meant by ``name``.

    ``name`` may be a key of another program, or one of our ``keys`` without its group. If ``name``
    begins with one of our groups, only that group's keys are returned, if there are any.
    """
    parts = name.replace("-", "_").split(".")
    ends = [".".join(parts[start:]) for start in range(len(parts))]
    known = next((OTHER_NAMES[end] for end in ends if end in OTHER_NAMES), None)
    within = next(([end] for end in ends[1:] if end in keys), None)
    found = known or within or [key for key in keys if key.endswith(f".{parts[-1]}")]
    return [each for each in found if each.startswith(f"{parts[0]}.")] or found
