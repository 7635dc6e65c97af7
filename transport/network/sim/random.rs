//! The one source of chance: a seeded generator, so that a run of one thread can be replayed by its seed.

/// xorshift64*.
#[derive(Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Random {
        // Seeds are small numbers: spread them over all bits, and away from 0, where the generator stays.
        Random(seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Uniform from 0 to `most`, inclusive; draws nothing where there is no choice.
    pub(super) fn up_to(&mut self, most: u64) -> u64 {
        if most == 0 {
            return 0;
        }
        // The bias of this reduction is below most / 2^64.
        ((u128::from(self.next()) * (u128::from(most) + 1)) >> 64) as u64
    }

    /// True so many times in a thousand; draws nothing where there is no choice.
    pub(super) fn permille(&mut self, times: u32) -> bool {
        times > 0 && self.up_to(999) < u64::from(times)
    }
}
