"""PPO in a loop of your own, on the models of a finished run: python examples/plain_ppo_loop.py."""

from rlhf import PPOTrainer, RLHFEngine, load_run

STEPS = 2
config = load_run("runs/latest")
engine = RLHFEngine(config)  # actor, reference, critic and reward model
trainer = PPOTrainer(engine, config.ppo)

questions = ["Name a fruit.", "Say hello.", "Count to three.", "Which is larger, 3 or 5?"]
prompts = [f"\n\nHuman: {each}\n\nAssistant:" for each in questions]
needed = config.ppo.rollout_batch_size // config.ppo.responses_per_prompt
batch = [prompts[i % len(prompts)] for i in range(needed)]

for step in range(STEPS):
    # 1. Sample a response to each prompt, and score it.
    rollout = trainer.generate_experience(engine.prompts(batch, step=step))
    # 2. Learn from rewards, KL and advantages of the rollout.
    stats = trainer.train_rlhf(rollout)
    kl, score = stats.metrics["ppo/kl_to_reference"], stats.metrics["ppo/score_mean"]
    print(f"step {step}: score {score:.3f}, KL {kl:.3f} nats, actor loss {stats.actor_loss:.4f}")

# 3. See an answer.
row = rollout.responses.ids_BT[0][rollout.responses.keep_BT[0]]
print(questions[0], "->", engine.tokenizer.decode(row, skip_special_tokens=True).strip())
engine.close()
