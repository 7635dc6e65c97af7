//! A transport whose posts and polls are a test's; all other calls succeed and do nothing.

use tokenyard::internals::transport::network::{
    Event, Failure, Limits, Posted, RegionId, Released, Span, Transport, WriteImm,
};
use tokenyard::{Rank, Result};

/// A stub's implementation of [`Transport`]'s functions of the same names.
pub trait Carrier: Send {
    fn nics(&self) -> usize {
        1
    }

    fn post(&mut self, write: &WriteImm) -> Result<Posted>;

    fn send(&mut self, _peer: Rank, _message: &[u8]) -> Result<Posted> {
        Ok(Posted::Accepted)
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }

    fn poll(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<usize>;

    fn explain(&self, _failure: Failure) -> String {
        String::new()
    }
}

pub struct Stub<C>(pub C);

impl<C: Carrier> Transport for Stub<C> {
    fn nics(&self) -> usize {
        self.0.nics()
    }

    fn limits(&self) -> Limits {
        Limits::NONE
    }

    unsafe fn register(&mut self, _: Span) -> Result<RegionId> {
        Ok(RegionId(0))
    }

    fn deregister(&mut self, _: RegionId) -> Result<Released> {
        Ok(Released::Done)
    }

    fn address(&mut self, _: Rank) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }

    fn connect(&mut self, _: Rank, _: &[u8]) -> Result<()> {
        Ok(())
    }

    fn post(&mut self, write: &WriteImm) -> Result<Posted> {
        self.0.post(write)
    }

    fn send(&mut self, peer: Rank, message: &[u8]) -> Result<Posted> {
        self.0.send(peer, message)
    }

    fn flush(&mut self) -> Result<()> {
        self.0.flush()
    }

    fn poll(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<usize> {
        self.0.poll(on_event)
    }

    fn explain(&self, failure: Failure) -> String {
        self.0.explain(failure)
    }

    fn reset(&mut self) -> Result<()> {
        Ok(())
    }
}
