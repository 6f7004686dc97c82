local wait = young()
if wait then
    return { 'young', stamp, wait }
end
