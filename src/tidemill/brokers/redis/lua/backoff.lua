-- The delay of a job after a failed attempt: the function `backoff` of retry.py, in Lua. Also the other function that
-- reads an envelope field by field.

local Backoff = {ATTEMPT = '>I4dddBI2c0I4c0I4c0'} -- then the number of the run, except for the first run
do -- the library is one Lua function, with at most 200 local names
  -- The codes of msgpack for the size of a text, and for a number.
  local SIZES = {[0xc4] = '>B', [0xc5] = '>I2', [0xc6] = '>I4', [0xd9] = '>B', [0xda] = '>I2', [0xdb] = '>I4'}
  local NUMBERS = {
    [0xca] = '>f', [0xcb] = '>d', [0xcc] = '>B', [0xcd] = '>I2', [0xce] = '>I4', [0xcf] = '>I8',
    [0xd0] = '>b', [0xd1] = '>i2', [0xd2] = '>i4', [0xd3] = '>i8',
  }

  -- Read one msgpack value: the value, and the offset of the next. A text is read as '', an array as its length.
  local function read_value(data, at)
    local code = byte(data, at)
    if code < 0x80 then return code, at + 1 end
    if code >= 0xe0 then return code - 0x100, at + 1 end
    if code >= 0xa0 and code < 0xc0 then return '', at + 1 + code - 0xa0 end
    if code >= 0x90 and code < 0xa0 then return code - 0x90, at + 1 end
    if code == 0xc2 or code == 0xc3 then return code == 0xc3, at + 1 end
    if SIZES[code] then
      local size, from = unpk(SIZES[code], data, at + 1)
      return '', from + size
    end
    return unpk(NUMBERS[code], data, at + 1)
  end

  local RETRIES = 11 -- the number of fields of an envelope before its retry policy

  -- The retry policy in an envelope: limit, delay, factor, cap, jitter, immediate.
  function Backoff.policy_in(envelope)
    local at = byte(envelope) == 0xdc and 4 or 2
    local value
    for _ = 1, RETRIES do value, at = read_value(envelope, at) end
    local policy, count = {}, 0
    count, at = read_value(envelope, at)
    for field = 1, count do policy[field], at = read_value(envelope, at) end
    return policy
  end

  -- An envelope with an empty body, which is its fourth field.
  function Backoff.without_body(envelope)
    local at, from, _ = byte(envelope) == 0xdc and 4 or 2, 0, nil
    for _ = 1, 4 do
      from = at
      _, at = read_value(envelope, from)
    end
    return sub(envelope, 1, from - 1) .. '\196\0' .. sub(envelope, at)
  end

  -- A number from 0 to 1 out of a seed. The server's own generator begins with the same number in each script.
  local function fraction(seed)
    return (seed % 2147483647) * 16807 % 2147483647 / 2147483647
  end

  -- Seconds until a job whose attempt failed is ready again.
  function Backoff.after(j)
    local policy = Backoff.policy_in(envs[j.id] or call('HGET', K_ENV, j.id))
    local limit, delay, factor, cap, jitter, immediate = unpack(policy)
    local step = j.attempt - 1 - (immediate or 0)
    if limit < 0 or delay <= 0 or step < 0 then return 0 end
    local bound = math.min(cap, delay * factor ^ math.min(step, 64))
    return jitter and bound * fraction(now + j.seq) or bound
  end
end
