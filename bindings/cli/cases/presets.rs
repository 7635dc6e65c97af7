//! Shapes of published models, from their configurations. Constants for the command line.

use tokenyard::internals::base::{Dtype, Error, Result};

/// The shape of one model's expert layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preset {
    pub name: &'static str,
    pub hidden: usize,
    pub experts: usize,
    pub top_k: usize,
    /// Type of the dispatched rows; fp8 rows carry scales.
    pub dtype: Dtype,
}

/// The presets of `--preset`; the first is the default.
pub const PRESETS: [Preset; 5] = [
    Preset { name: "v3", hidden: 7168, experts: 256, top_k: 8, dtype: Dtype::Fp8E4m3 },
    Preset { name: "kimi-k2", hidden: 7168, experts: 384, top_k: 8, dtype: Dtype::Fp8E4m3 },
    Preset { name: "qwen3-235b", hidden: 4096, experts: 128, top_k: 8, dtype: Dtype::Bf16 },
    Preset { name: "gpt-oss-120b", hidden: 2880, experts: 128, top_k: 4, dtype: Dtype::Bf16 },
    Preset { name: "mixtral-8x22b", hidden: 6144, experts: 8, top_k: 2, dtype: Dtype::Bf16 },
];

/// The preset of that name.
pub fn find(name: &str) -> Result<&'static Preset> {
    PRESETS.iter().find(|preset| preset.name == name).ok_or_else(|| {
        Error::argument(
            "--preset",
            format!("`{name}`"),
            format!("name one of {}", PRESETS.map(|preset| preset.name).join(", ")),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_are_found_by_name_and_others_are_refused_with_the_list() {
        for preset in &PRESETS {
            assert_eq!(find(preset.name).ok(), Some(preset));
        }
        let refused = find("v4").unwrap_err().to_string();
        assert!(refused.contains("--preset is `v4`") && refused.contains("kimi-k2"), "{refused}");
    }

    #[test]
    fn presets_have_the_shapes_of_the_models_configurations() {
        // hidden_size; the routed experts and how many of them a token has; fp8 weights where the model has them.
        let shape = |name: &str| {
            let Preset { hidden, experts, top_k, dtype, .. } = *find(name).unwrap();
            (hidden, experts, top_k, dtype.name())
        };
        assert_eq!(shape("v3"), (7168, 256, 8, "fp8"));
        assert_eq!(shape("kimi-k2"), (7168, 384, 8, "fp8"));
        assert_eq!(shape("qwen3-235b"), (4096, 128, 8, "bf16"));
        assert_eq!(shape("gpt-oss-120b"), (2880, 128, 4, "bf16"));
        assert_eq!(shape("mixtral-8x22b"), (6144, 8, 2, "bf16"));
    }
}
