from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

raise SystemExit("this file is read, not run")
rows = load_dataset("json", data_files="chats.jsonl")
lora = LoraConfig(
    r=16, lora_alpha=32, lora_dropout=0.05, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", bias="none"
)
trainer = SFTTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    args=SFTConfig(
        output_dir="tuned",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=2e-4,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        max_steps=300,
        max_length=2048,
        packing=True,
        assistant_only_loss=True,
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=50,
        save_total_limit=2,
        report_to="none",
    ),
    train_dataset=rows,
    peft_config=lora,
)
