-- Bindings of queues to patterns of topics. The hash B:bindings has a field for each binding. The empty
-- field has the version of the bindings.

local K_BINDINGS = ':bindings'

-- Note that the bindings have changed; `version` is a new id.
local function changed_bindings(version) call('HSET', B .. K_BINDINGS, '', version) end

-- Bind a queue to a pattern; 0 when it is bound already.
local function bind(queue, pattern, version)
  row_of(queue) -- a new queue is made
  if call('HSETNX', B .. K_BINDINGS, pattern .. '\0' .. queue, '') == 0 then return 0 end
  changed_bindings(version)
  return 1
end

-- Delete a binding; 0 when there is no such binding.
local function unbind(queue, pattern, version)
  if call('HDEL', B .. K_BINDINGS, pattern .. '\0' .. queue) == 0 then return 0 end
  changed_bindings(version)
  return 1
end

-- Delete all bindings of a queue.
local function drop_bindings(queue, version)
  local ending, found = '\0' .. queue, {}
  for _, field in ipairs(call('HKEYS', B .. K_BINDINGS)) do
    if sub(field, -#ending) == ending then found[#found + 1] = field end
  end
  for _, field in ipairs(found) do call('HDEL', B .. K_BINDINGS, field) end
  if found[1] then changed_bindings(version) end
end
