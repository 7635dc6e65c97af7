//! Findings of the doctor.

use serde::Serialize;

/// One finding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub topic: &'static str,
    pub lacking: bool,
    pub what: String,
    /// The cost of a lack.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost: Option<&'static str>,
    /// The remedy of a lack.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<&'static str>,
}

impl Finding {
    pub fn has(topic: &'static str, what: impl Into<String>) -> Finding {
        Finding { topic, lacking: false, what: what.into(), cost: None, remedy: None }
    }

    pub fn lacks(topic: &'static str, what: impl Into<String>, cost: &'static str, remedy: &'static str) -> Finding {
        Finding { topic, lacking: true, what: what.into(), cost: Some(cost), remedy: Some(remedy) }
    }
}
