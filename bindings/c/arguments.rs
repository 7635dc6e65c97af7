//! Pointers and structs of the caller, checked before anything else is done.
//!
//! Place: at the head of every function. On the caller's thread; never waits, and allocates only errors and objects.

use crate::base::{Error, Result};
use std::ffi::{CStr, c_char};
use std::mem::MaybeUninit;

/// The largest struct of any version: a larger size is no size.
const MOST_BYTES: usize = 4096;

/// A struct of the caller's, whose first field is its size in bytes as `uint32_t`.
///
/// # Safety
/// The type is `repr(C)` and begins with that field. If it is [`read`], any bits are a value of it.
pub(super) unsafe trait Versioned: Copy {
    /// Its size in the first version that had it.
    const FIRST: usize;
}

#[cold]
fn null(name: &'static str) -> Error {
    Error::argument(name, "NULL", "give a valid pointer")
}

/// The object of an argument.
pub(super) fn object<'a, T>(name: &'static str, given: Option<&'a T>) -> Result<&'a T> {
    given.ok_or_else(|| null(name))
}

fn check_pointer<T>(name: &'static str, given: *const T) -> Result<()> {
    if given.is_null() {
        return Err(null(name));
    }
    if !given.is_aligned() {
        let advice = format!("its address must be a multiple of {}", align_of::<T>());
        return Err(Error::argument(name, format!("{given:p}"), advice));
    }
    Ok(())
}

/// An object, behind the pointer that the caller has, and the process that made it.
#[repr(C)]
pub(super) struct Made<T> {
    object: T,
    pub process: u32,
}

/// The pointer by which the caller knows an object from now on.
pub(super) fn make<T>(object: T) -> *mut T {
    Box::into_raw(Box::new(Made { object, process: std::process::id() })).cast()
}

/// Where a new object goes. It is NULL until then, and if the function fails.
pub(super) struct Out<T>(*mut *mut T);

impl<T> Out<T> {
    /// # Safety
    /// `out` is NULL, or can be written.
    pub unsafe fn new(name: &'static str, out: *mut *mut T) -> Result<Out<T>> {
        check_pointer(name, out.cast_const())?;
        // SAFETY: as the caller says; neither NULL nor misaligned.
        unsafe { out.write(std::ptr::null_mut()) };
        Ok(Out(out))
    }

    pub fn give(self, object: T) {
        // SAFETY: as in `new`, by whose terms the function that has this place can write it.
        unsafe { self.0.write(make(object)) };
    }
}

/// Writes a number or a plain struct.
///
/// # Safety
/// `out` is NULL, or can be written.
pub(super) unsafe fn write<T: Copy>(name: &'static str, out: *mut T, value: T) -> Result<()> {
    check_pointer(name, out.cast_const())?;
    // SAFETY: as the caller says; neither NULL nor misaligned.
    unsafe { out.write(value) };
    Ok(())
}

/// The size that a struct states.
///
/// # Safety
/// `given` is NULL, or its first four bytes can be read.
unsafe fn stated_size<T: Versioned>(name: &'static str, given: *const T) -> Result<usize> {
    const { assert!(size_of::<T>() >= T::FIRST && size_of::<T>() <= MOST_BYTES) };
    check_pointer(name, given)?;
    // SAFETY: as the caller says; aligned to more than 4 bytes or as much.
    let size = unsafe { given.cast::<u32>().read() } as usize;
    if (T::FIRST..=MOST_BYTES).contains(&size) {
        return Ok(size);
    }
    let advice = format!(
        "it has at least {} bytes: begin with what the struct's function of that name with _init gives",
        T::FIRST
    );
    Err(Error::argument(name, format!("of size {size}"), advice))
}

/// The caller's struct. Fields that it does not have yet are 0.
///
/// # Safety
/// `given` is NULL, or as many bytes as its size states can be read.
pub(super) unsafe fn read<T: Versioned>(name: &'static str, given: *const T) -> Result<T> {
    // SAFETY: as the caller says.
    let size = unsafe { stated_size(name, given)? };
    let mut value = MaybeUninit::<T>::zeroed();
    let known = size.min(size_of::<T>());
    // SAFETY: `known` bytes can be read, and there is room for them.
    unsafe { std::ptr::copy_nonoverlapping(given.cast::<u8>(), value.as_mut_ptr().cast::<u8>(), known) };
    // SAFETY: the bytes behind what is known, which can be read.
    let tail = unsafe { std::slice::from_raw_parts(given.cast::<u8>().add(known), size - known) };
    if tail.iter().any(|byte| *byte != 0) {
        let advice = "a field is set that this library does not know; leave it 0, or use the library of its header";
        return Err(Error::argument(name, format!("of size {size}, where {} are known", size_of::<T>()), advice));
    }
    // SAFETY: any bits are a value of it (`Versioned`), and all are set.
    Ok(unsafe { value.assume_init() })
}

/// Refuses a field without a meaning that is not 0: a later version may give it one.
pub(super) fn reserved(given: u32) -> Result<()> {
    if given != 0 {
        return Err(Error::argument("reserved", given, "leave it 0, as the struct's function with _init does"));
    }
    Ok(())
}

/// Fills in the caller's struct, as far as the caller knows it; what it has beyond that becomes 0.
///
/// # Safety
/// `given` is NULL, or as many bytes as its size states can be read and written.
pub(super) unsafe fn write_struct<T: Versioned>(name: &'static str, given: *mut T, value: T) -> Result<()> {
    const SIZE: usize = size_of::<u32>();
    // SAFETY: as the caller says.
    let size = unsafe { stated_size(name, given.cast_const())? };
    let known = size.min(size_of::<T>());
    let (from, to) = ((&raw const value).cast::<u8>(), given.cast::<u8>());
    // SAFETY: both have `known` bytes, which the caller's may be written; the size stays as it is.
    unsafe { std::ptr::copy_nonoverlapping(from.add(SIZE), to.add(SIZE), known - SIZE) };
    // SAFETY: the bytes behind what is known.
    unsafe { std::ptr::write_bytes(to.add(known), 0, size - known) };
    Ok(())
}

/// `count` numbers or plain structs of the caller; none if `count` is 0.
///
/// # Safety
/// `given` is NULL, or `count` elements can be read, as long as the result is used.
pub(super) unsafe fn list<'a, T: Copy>(name: &'static str, given: *const T, count: usize) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    check_pointer(name, given)?;
    check_bytes::<T>(name, count)?;
    // SAFETY: as the caller says; neither NULL nor misaligned, nor beyond the address space.
    Ok(unsafe { std::slice::from_raw_parts(given, count) })
}

/// As [`list`], to be written; all bytes are 0 at first.
///
/// # Safety
/// `given` is NULL, or `count` elements can be written, and nothing else uses them. Bytes that are 0 are a value of T.
pub(super) unsafe fn list_mut<'a, T: Copy>(name: &'static str, given: *mut T, count: usize) -> Result<&'a mut [T]> {
    if count == 0 {
        return Ok(&mut []);
    }
    check_pointer(name, given.cast_const())?;
    check_bytes::<T>(name, count)?;
    // SAFETY: as the caller says; neither NULL nor misaligned, nor beyond the address space. The caller's memory may
    // never have been written.
    unsafe { given.write_bytes(0, count) };
    // SAFETY: as above; all of it has just been written.
    Ok(unsafe { std::slice::from_raw_parts_mut(given, count) })
}

fn check_bytes<T>(name: &'static str, count: usize) -> Result<()> {
    match count.checked_mul(size_of::<T>()) {
        Some(bytes) if bytes <= isize::MAX as usize => Ok(()),
        _ => Err(Error::argument(name, format!("{count} elements"), "give as many as there are in memory")),
    }
}

/// Gives a list to the caller: `*count` is how many there are, and the first `capacity` of them go to `given`.
///
/// # Safety
/// `count` is NULL or can be written; `given` is NULL, or `capacity` elements can be written.
pub(super) unsafe fn give_list<T: Copy>(
    given: *mut T,
    capacity: usize,
    count: *mut usize,
    values: impl ExactSizeIterator<Item = T>,
) -> Result<()> {
    // SAFETY: as the caller says.
    unsafe { write("count", count, values.len())? };
    // SAFETY: as the caller says.
    let room = unsafe { list_mut("values", given, capacity.min(values.len()))? };
    room.iter_mut().zip(values).for_each(|(place, value)| *place = value);
    Ok(())
}

/// The caller's text; `None` if it is NULL.
///
/// # Safety
/// `given` is NULL, or a string that ends with 0, as long as the result is used.
pub(super) unsafe fn text<'a>(name: &'static str, given: *const c_char) -> Result<Option<&'a str>> {
    if given.is_null() {
        return Ok(None);
    }
    // SAFETY: as the caller says.
    let given = unsafe { CStr::from_ptr(given) };
    match given.to_str() {
        Ok(text) => Ok(Some(text)),
        // Without the text, which may be a secret.
        Err(error) => {
            let value =
                format!("{} bytes that are not UTF-8 from byte {} on", given.count_bytes(), error.valid_up_to());
            Err(Error::argument(name, value, "give text in UTF-8"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    #[derive(Debug, Clone, Copy, PartialEq)]
    struct Grown {
        size: u32,
        first: u32,
        second: u64,
        added: u64,
    }

    // SAFETY: a C struct of numbers that begins with its size.
    unsafe impl Versioned for Grown {
        const FIRST: usize = 16;
    }

    /// Memory of a struct that is `size` bytes long, of more bytes with the value 7.
    fn bytes(size: u32) -> [u64; 5] {
        let sevens = u64::from_ne_bytes([7; 8]);
        let mut words = [sevens; 5];
        words[0] = u64::from_ne_bytes([size.to_ne_bytes(), [7; 4]].concat().try_into().unwrap());
        words
    }

    fn read_grown(words: &[u64; 5]) -> Result<Grown> {
        // SAFETY: as many words as any size of these tests states that is not refused.
        unsafe { read("grown", words.as_ptr().cast::<Grown>()) }
    }

    #[test]
    fn fields_that_an_older_caller_lacks_are_0() {
        let sevens = u64::from_ne_bytes([7; 8]);
        let first = u32::from_ne_bytes([7; 4]);
        let grown = |size, added| Grown { size, first, second: sevens, added };
        assert_eq!(read_grown(&bytes(16)).unwrap(), grown(16, 0));
        assert_eq!(read_grown(&bytes(24)).unwrap(), grown(24, sevens));
        // A field that is cut in two is no version, but does no harm.
        assert_eq!(read_grown(&bytes(20)).unwrap().added, u64::from_ne_bytes([7, 7, 7, 7, 0, 0, 0, 0]));
    }

    #[test]
    fn fields_that_a_newer_caller_has_must_be_0() {
        let text = read_grown(&bytes(40)).unwrap_err().to_string();
        assert!(text.contains("argument grown is of size 40, where 24 are known"), "{text}");
        let mut words = bytes(40);
        words[3..].fill(0);
        assert_eq!(read_grown(&words).unwrap().size, 40);
    }

    #[test]
    fn sizes_that_no_version_has_are_refused() {
        for size in [0, 4, 15, 4097, u32::MAX] {
            let text = read_grown(&bytes(size)).unwrap_err().to_string();
            assert!(text.contains(&format!("argument grown is of size {size}: it has at least 16 bytes")), "{text}");
        }
    }

    #[test]
    fn a_struct_is_filled_in_as_far_as_the_caller_knows_it() {
        let value = Grown { size: 0, first: 1, second: 2, added: 3 };
        let fill = |size| {
            let mut words = bytes(size);
            // SAFETY: as many words as `size` states.
            unsafe { write_struct("grown", words.as_mut_ptr().cast::<Grown>(), value).unwrap() };
            words
        };
        let head =
            |size: u32| u64::from_ne_bytes([size.to_ne_bytes(), 1u32.to_ne_bytes()].concat().try_into().unwrap());
        let sevens = u64::from_ne_bytes([7; 8]);
        assert_eq!(fill(16), [head(16), 2, sevens, sevens, sevens]);
        assert_eq!(fill(24), [head(24), 2, 3, sevens, sevens]);
        assert_eq!(fill(40), [head(40), 2, 3, 0, 0]);
    }

    #[test]
    fn lists_give_what_there_is_room_for_and_how_many_there_are() {
        let (mut room, mut count) = ([9u32; 2], 0);
        // SAFETY: the pointers are of what they are said to be of.
        unsafe { give_list(room.as_mut_ptr(), 2, &raw mut count, [1, 2, 3].into_iter()).unwrap() };
        assert_eq!((room, count), ([1, 2], 3));
        // SAFETY: as above; no element is written.
        unsafe { give_list(std::ptr::null_mut::<u32>(), 0, &raw mut count, [1].into_iter()).unwrap() };
        assert_eq!(count, 1);
        // SAFETY: as above.
        let refused = unsafe { give_list(std::ptr::null_mut::<u32>(), 1, &raw mut count, [1].into_iter()) };
        assert!(refused.unwrap_err().to_string().contains("values is NULL"));
    }
}
