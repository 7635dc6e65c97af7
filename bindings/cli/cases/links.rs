//! The link models of the simulated network, as words.
//!
//! Before the data path; pure functions on any thread.

use std::fmt;

use tokenyard::internals::transport::network::sim::{LinkModel, models};

/// How fast a rank's simulated NICs are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Link {
    /// Without limits.
    None,
    /// One ConnectX-7 a rank.
    Cx7,
    /// Four NICs of EFA's second generation a rank.
    EfaP5,
    /// Two NICs of EFA's third generation a rank.
    EfaP5en,
    /// One NIC.
    Given(LinkModel),
}

/// The library's models of these names.
const CX7: models::Link = models::NAMED[1].link;
const EFA_P5: models::Link = models::NAMED[2].link;
const EFA_P5EN: models::Link = models::NAMED[3].link;

impl Link {
    /// Reads the argument of `--link`.
    pub fn parse(text: &str) -> Result<Link, String> {
        let named = match text {
            "none" => Some(Link::None),
            "cx7" => Some(Link::Cx7),
            "efa-p5" => Some(Link::EfaP5),
            "efa-p5en" => Some(Link::EfaP5en),
            _ => Link::given(text),
        };
        let advice = "give none, cx7, efa-p5, efa-p5en or GBPS:LATENCY_US:PER_MESSAGE_US, say 400:5:0.2";
        named.ok_or_else(|| advice.to_string())
    }

    /// Three numbers, within the limits of the simulated network: a rate of at least 0.001 Gb/s, and times of at most a
    /// second.
    fn given(text: &str) -> Option<Link> {
        let numbers: Option<Vec<f64>> = text.split(':').map(|n| n.parse().ok()).collect();
        let &[gbps, latency_us, per_message_us] = numbers?.as_slice() else { return None };
        let time = |us: f64| (0.0..=1e6).contains(&us);
        let usable = gbps.is_finite() && gbps >= 1e-3 && time(latency_us) && time(per_message_us);
        usable.then_some(Link::Given(LinkModel { gbps, latency_us, per_message_us }))
    }

    /// The model of one NIC.
    pub fn model(self) -> LinkModel {
        match self {
            Link::None => LinkModel::FREE,
            Link::Cx7 => CX7.nic,
            Link::EfaP5 => EFA_P5.nic,
            Link::EfaP5en => EFA_P5EN.nic,
            Link::Given(model) => model,
        }
    }

    /// NICs of a rank, unless their number is given.
    pub fn nics(self) -> usize {
        match self {
            Link::EfaP5 => usize::from(EFA_P5.nics),
            Link::EfaP5en => usize::from(EFA_P5EN.nics),
            Link::None | Link::Cx7 | Link::Given(_) => 1,
        }
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Link::None => f.write_str("none"),
            Link::Cx7 => f.write_str("cx7"),
            Link::EfaP5 => f.write_str("efa-p5"),
            Link::EfaP5en => f.write_str("efa-p5en"),
            Link::Given(model) => write!(f, "{}:{}:{}", model.gbps, model.latency_us, model.per_message_us),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_read_as_they_are_printed() {
        assert_eq!(models::NAMED.map(|named| named.name), ["none", "cx7", "efa-p5", "efa-p5en"]);
        for text in ["none", "cx7", "efa-p5", "efa-p5en", "400:5:0.2", "0.5:0:0"] {
            assert_eq!(Link::parse(text).unwrap().to_string(), text);
        }
        for text in
            ["", "fast", "400", "400:5", "400:5:0.2:1", "0:5:0.2", "-1:5:0.2", "400:-5:0.2", "inf:1:1", "1:2e6:0"]
        {
            assert!(Link::parse(text).unwrap_err().contains("cx7"), "{text}");
        }
    }

    #[test]
    fn a_word_is_the_librarys_model_of_that_name() {
        for text in ["none", "cx7", "efa-p5", "efa-p5en", "400:5:0.2"] {
            let (link, model) = (Link::parse(text).unwrap(), models::parse(text).unwrap());
            assert_eq!((link.model(), link.nics()), (model.nic, usize::from(model.nics)), "{text}");
        }
        let given = Link::parse("1:2:3").unwrap().model();
        assert_eq!((given.gbps, given.latency_us, given.per_message_us), (1.0, 2.0, 3.0));
    }
}
